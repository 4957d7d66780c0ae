"""Where things lie: ``storage.uri`` as an S3 bucket and prefix, or a local folder."""

import os
from dataclasses import dataclass
from pathlib import Path

from tide_platform.config import ConfigError
from tide_platform.config.schema import Storage


@dataclass(frozen=True)
class Location:
    """A parsed ``storage.uri``; ``bucket`` is None for a local folder."""

    bucket: str | None
    prefix: str  # of keys in the bucket, or the absolute path of the folder; no slash at its end
    storage: Storage

    @classmethod
    def of(cls, storage: Storage) -> "Location":
        scheme, separator, rest = storage.uri.partition("://")
        if not separator or scheme == "file":
            return cls(None, str(Path(rest if separator else storage.uri).expanduser().resolve()), storage)
        if scheme != "s3":
            raise ConfigError(
                f"storage.uri: {storage.uri}: {scheme} is neither s3://bucket/prefix nor a folder"
            )
        bucket, _, prefix = rest.partition("/")
        if not bucket:
            raise ConfigError(f"storage.uri: {storage.uri}: names no bucket")
        return cls(bucket, prefix.strip("/"), storage)

    def key(self, name: str) -> str:
        return f"{self.prefix}/{name}" if self.prefix else name

    def uri(self, name: str) -> str:
        return f"s3://{self.bucket}/{self.key(name)}" if self.bucket else f"{self.prefix}/{name}"

    def lance_options(self) -> dict[str, str] | None:
        """Lance's ``storage_options``; keys come from the environment, never from the configuration."""
        if self.bucket is None:
            return None
        options = {
            "aws_region": self.storage.region,
            "aws_unsigned_payload": "true",  # hashing the payload costs the client 0.9 CPU-s a GB
            "connect_timeout": "5s",
            "client_max_retries": "3",
            "client_retry_timeout": "30",
        }
        if endpoint := self.storage.endpoint:
            options |= {"aws_endpoint": endpoint, "aws_virtual_hosted_style_request": "false"}
            if endpoint.startswith("http://"):
                options["allow_http"] = "true"
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
            if value := os.environ.get(name):
                options[name.lower()] = value
        return options
