"""Whether a pod sees what its job names: checked before anything is started."""

from pathlib import Path

from tide_platform.config import TideError
from tide_platform.config.cluster import TrainerPods
from tide_platform.training.job import TrainJob


class NotShared(TideError):
    """A path of the job that no volume of the pods has."""

    def __init__(self, what: str, path: Path, writing: bool):
        super().__init__(
            f"the training pods do not see {what} ({path}){' to write' if writing else ''}: put it on a "
            "volume of cluster.trainer.volumes, at the same path in this run and in the pods"
        )
        self.what, self.path, self.writing = what, path, writing


def check_shared(pods: TrainerPods, file: Path, job: TrainJob) -> None:
    """Raises :class:`NotShared` for the first path that the pods would not find."""
    places = {"the job's file": file, "the target": job.target, "the draft to start from": job.parent}
    uri = job.settings.storage.uri
    if "://" not in uri:
        places["storage.uri"] = Path(uri)
    for what, path in places.items():
        _check(pods, what, path, writing=False)
    _check(pods, "the job's folder", job.out, writing=True)


def _check(pods: TrainerPods, what: str, path: Path, writing: bool) -> None:
    real = path.resolve()
    for mount in pods.volumes:
        if real.is_relative_to(mount.path.resolve()) and not (writing and mount.read_only):
            return
    raise NotShared(what, path, writing)
