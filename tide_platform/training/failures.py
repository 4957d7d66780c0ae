"""Why a process of a run failed, as a file on the run's volume: the one word on it that nothing cuts off.

Of many processes' output the first error is soon buried under what the others say of it, and in a cluster the
log's end is all that is kept.
"""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from tide_platform.config.files import write_json
from tide_platform.training.job import FAILED, RUN_FOLDER
from tide_platform.training.progress import Stopped
from tide_platform.training.world import PeerFailed, World


@contextlib.contextmanager
def noting_failures(out: Path, world: World) -> Iterator[None]:
    """Writes ``out/run/failed-RANK.json`` (rank, kind, text, at: Unix time) for an error of this process's
    own; what only another process had, and being asked to stop, are none.
    """
    try:
        yield
    except (PeerFailed, Stopped):
        raise
    except Exception as error:
        told = {"rank": world.rank, "kind": type(error).__name__, "text": str(error), "at": time.time()}
        # the error itself counts, also where the volume is what failed
        with contextlib.suppress(OSError):
            (out / RUN_FOLDER).mkdir(parents=True, exist_ok=True)
            write_json(out / RUN_FOLDER / FAILED.format(world.rank), told)
        raise


def forget_failures(out: Path) -> None:
    """Those of earlier tries."""
    for path in (out / RUN_FOLDER).glob(FAILED.format("*")):
        path.unlink(missing_ok=True)
