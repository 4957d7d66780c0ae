"""The doctor on the places that a deployment writes to: disk, ledger, MLflow."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx

from tide_platform.capture.packing import packed_bytes
from tide_platform.config import Settings
from tide_platform.gate.doctor import Finding
from tide_platform.store.location import Location

TOKENS = 512  # of a sample, where none is stored yet
_SQLITE = "sqlite:///"


def disk(settings: Settings, hidden_size: int | None, mean_tokens: float | None) -> Iterator[Finding]:
    """Whether the spool's budget, the ring and a window of samples have room."""
    capture = settings.capture
    rings = capture.ring_bytes * settings.serving.dp_size
    least = rings + 2 * capture.segment_bytes  # without so much nothing is captured at all
    state = _existing(settings.state)
    free = shutil.disk_usage(state).free
    budget = capture.spool_bytes + rings
    text = f"{state}: {_size(free)} free; ring and spool take up to {_size(budget)}"
    if free < least:
        mend = f"free {_size(least - free)}, or lower capture.ring_bytes and capture.segment_bytes"
        yield Finding("disk", "error", f"{text}, {_size(least)} at least", mend)
    elif free < budget:
        yield Finding(
            "disk", "warn", text, "lower capture.spool_bytes, or free so much: samples are lost else"
        )
    else:
        yield Finding("disk", "ok", text)
    location = Location.of(settings.storage)
    if location.bucket is not None or hidden_size is None:
        return
    wanted = window_bytes(settings, hidden_size, mean_tokens or TOKENS)
    store = _existing(Path(location.prefix))
    free = shutil.disk_usage(store).free
    kind = "measured" if mean_tokens else "assumed"
    text = (
        f"{store}: {_size(free)} free; a window of {settings.window.min_samples} samples of "
        f"{mean_tokens or TOKENS:.0f} tokens ({kind}) takes {_size(wanted)}"
    )
    if free < wanted:
        mend = (
            "free so much, move storage.uri, or set window.min_samples, capture.aux_format or retention.days"
        )
        yield Finding("disk", "error", text, mend)
    else:
        yield Finding("disk", "ok", text)


def window_bytes(settings: Settings, hidden_size: int, tokens: float) -> int:
    """Of a window's samples in the dataset: training rows packed, validation rows whole."""
    features, teacher = 3 * hidden_size, settings.capture.teacher_k * (4 + 2) + 2 + 4
    form, share = settings.capture.aux_format, settings.window.validation_share
    whole = 2 * features
    packed = whole if form == "bf16" else packed_bytes(form, 1, features) - 4
    row = share * whole + (1 - share) * packed + teacher + 4 + 4
    return round(settings.window.min_samples * tokens * row)


def ledger(settings: Settings) -> Iterator[Finding]:
    url = settings.ledger.url
    if url.startswith(_SQLITE):
        yield _sqlite("ledger", url, "ledger.url")
        return
    from sqlalchemy import create_engine, text
    from sqlalchemy.exc import SQLAlchemyError

    try:
        with create_engine(url).connect() as connection:
            connection.execute(text("select 1"))
    except (SQLAlchemyError, ImportError) as error:
        shown = url.rpartition("@")[2]  # no password
        found = f"{shown}: cannot be reached ({type(error).__name__})"
        yield Finding("ledger", "error", found, "start the database, or set ledger.url")
    else:
        yield Finding("ledger", "ok", f"{url.rpartition('@')[2]} answers")


def mlflow(settings: Settings) -> Iterator[Finding]:
    uri = settings.registry.tracking_uri
    if uri.startswith(_SQLITE):
        yield _sqlite("mlflow", uri, "registry.tracking_uri")
    elif uri.startswith(("http://", "https://")):
        try:
            status = httpx.get(f"{uri.rstrip('/')}/health", timeout=10, trust_env=False).status_code
        except httpx.HTTPError as error:
            status = str(error) or type(error).__name__
        if status == 200:
            yield Finding("mlflow", "ok", f"{uri} answers")
        else:
            text = f"{uri}: no MLflow server answers there ({status})"
            yield Finding("mlflow", "error", text, "start it, or set registry.tracking_uri")
    else:
        mend = "set registry.tracking_uri to http://… or sqlite:///…"
        yield Finding("mlflow", "error", f"{uri}: neither a server nor a database file", mend)


def _sqlite(about: str, url: str, setting: str) -> Finding:
    path = Path(url.removeprefix(_SQLITE)).absolute()
    if path.exists():
        writable, state = os.access(path, os.W_OK), "is there"
    else:
        writable, state = os.access(_existing(path.parent), os.W_OK), "is made when it is first used"
    if not writable:
        return Finding(about, "error", f"{path}: cannot be written", f"mend its rights, or set {setting}")
    return Finding(about, "ok", f"{path} {state}")


def _existing(path: Path) -> Path:
    """The folder itself, or the nearest one above it that is there."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def _size(count: float) -> str:
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.1f} MiB"
