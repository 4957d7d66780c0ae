"""``tide doctor``: what of a deployment would not work, before anything is started; each with its mend.

One module a subject: ``doctor_serving.py`` (interpreter, ports, target, draft), ``doctor_store.py`` (store,
dataset, stored samples), ``doctor_places.py`` (disk, ledger, MLflow). Nothing is changed but a probe object
that the store is asked to write and remove.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from tide_platform.config import Settings, TideError

Grade = Literal["ok", "warn", "error"]


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's account."""

    about: (
        str  # interpreter | ports | target | draft | store | dataset | samples | template | disk | ledger ...
    )
    grade: Grade
    text: str
    mend: str = ""  # of a warning or an error, where the text does not say it

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


Step = Callable[[], Iterator[Finding]]


def guarded(about: str, step: Step) -> Iterator[Finding]:
    """The step's findings; an error that it raises, which names its mend, is one of them."""
    try:
        yield from step()
    except TideError as error:
        yield Finding(about, "error", str(error))
    except OSError as error:
        yield Finding(about, "error", str(error), "mend the path, or its rights, and ask again")


def diagnose(settings: Settings, draft: Path | None = None, target: Path | None = None) -> Iterator[Finding]:
    """Everything that can be looked at, in the order in which it is needed; errors of one subject don't hide
    the next.
    """
    from tide_platform.gate import doctor_places, doctor_serving, doctor_store

    yield Finding("configuration", "ok", f"deployment {settings.deployment}, {settings.serving.device}")
    serving = doctor_serving.Serving(settings, draft, target)
    yield from guarded("interpreter", serving.interpreter)
    yield from guarded("ports", serving.ports)
    yield from guarded("target", serving.check_target)
    yield from guarded("draft", serving.check_draft)
    store = doctor_store.Stored(settings, serving)
    yield from guarded("store", store.conditional_puts)
    yield from guarded("dataset", store.dataset)
    yield from guarded("samples", store.samples)
    yield from guarded("template", store.template)
    yield from guarded("disk", lambda: doctor_places.disk(settings, serving.hidden_size, store.mean_tokens))
    yield from guarded("ledger", lambda: doctor_places.ledger(settings))
    yield from guarded("mlflow", lambda: doctor_places.mlflow(settings))
