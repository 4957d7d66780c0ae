"""The few S3 calls that the platform makes, with boto3's errors turned into ours."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import boto3
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

from tide_platform.store.errors import ObjectMissing, StoreRefused, StoreUnavailable
from tide_platform.store.local_files import Entry
from tide_platform.store.location import Location

_MISSING = {"404", "NoSuchKey", "NoSuchBucket", "NotFound"}
_REFUSED = {"403", "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken"}
_TAKEN = {"412", "PreconditionFailed", "409", "ConditionalRequestConflict"}
_OWNED = {"BucketAlreadyOwnedByYou", "BucketAlreadyExists"}
_TRANSFER = TransferConfig(multipart_threshold=16 << 20, multipart_chunksize=16 << 20, max_concurrency=4)


class S3Files:
    """Objects below the location's prefix; names are relative to it."""

    def __init__(self, location: Location):
        assert location.bucket is not None
        self._location, self._bucket = location, location.bucket
        # a session of its own: the default one keeps the keys that it saw first
        self._client = boto3.Session().client(
            "s3",
            endpoint_url=location.storage.endpoint,
            region_name=location.storage.region,
            config=Config(
                connect_timeout=5,
                retries={"max_attempts": 4, "mode": "standard"},
                # stores that are not AWS know the older rule only
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                s3={"addressing_style": "path" if location.storage.endpoint else "auto"},
            ),
        )

    def ensure_root(self) -> None:
        """Makes the bucket where it is missing."""
        with self._errors(""):
            try:
                self._client.head_bucket(Bucket=self._bucket)
                return
            except ClientError as error:
                if _code(error) not in _MISSING:
                    raise
            region = self._location.storage.region
            outside = {} if region == "us-east-1" else {"LocationConstraint": region}
            options = {"CreateBucketConfiguration": outside} if outside else {}
            try:
                self._client.create_bucket(Bucket=self._bucket, **options)
            except ClientError as error:
                if _code(error) not in _OWNED:
                    raise

    def put(self, name: str, data: bytes, only_if_absent: bool = False) -> bool:
        """``False``: something is there already, and ``only_if_absent`` was asked for."""
        condition = {"IfNoneMatch": "*"} if only_if_absent else {}
        with self._errors(name):
            try:
                self._client.put_object(Bucket=self._bucket, Key=self._key(name), Body=data, **condition)
            except ClientError as error:
                if only_if_absent and _code(error) in _TAKEN:
                    return False
                raise
        return True

    def get(self, name: str) -> bytes:
        with self._errors(name):
            return self._client.get_object(Bucket=self._bucket, Key=self._key(name))["Body"].read()

    def upload(self, path: Path, name: str) -> None:
        with self._errors(name):
            self._client.upload_file(str(path), self._bucket, self._key(name), Config=_TRANSFER)

    def download(self, name: str, path: Path) -> None:
        with self._errors(name):
            self._client.download_file(self._bucket, self._key(name), str(path), Config=_TRANSFER)

    def exists(self, name: str) -> bool:
        try:
            with self._errors(name):
                self._client.head_object(Bucket=self._bucket, Key=self._key(name))
        except ObjectMissing:
            return False
        return True

    def entries(self, prefix: str) -> list[Entry]:
        start = self._key(prefix)
        cut = len(self._key("")) if self._location.prefix else 0
        with self._errors(prefix):
            pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=start)
            return [
                Entry(item["Key"][cut:], item["Size"], item["LastModified"].timestamp())
                for page in pages
                for item in page.get("Contents", [])
            ]

    def delete(self, name: str) -> None:
        with self._errors(name):
            self._client.delete_object(Bucket=self._bucket, Key=self._key(name))

    def _key(self, name: str) -> str:
        return self._location.key(name)

    @contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        uri = self._location.uri(name)
        try:
            yield
        except NoCredentialsError as error:
            raise StoreRefused(uri, str(error)) from error
        except ClientError as error:
            if _code(error) in _MISSING:
                raise ObjectMissing(uri) from error
            if _code(error) in _REFUSED:
                raise StoreRefused(uri, _code(error)) from error
            raise StoreUnavailable(uri, str(error)) from error
        except BotoCoreError as error:
            raise StoreUnavailable(uri, str(error)) from error


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))
