"""What ingest counts, for people and for monitoring."""

from dataclasses import asdict, dataclass

STATUS_FILE = "ingest.json"  # of the first worker on a spool folder, then ingest-1.json …
BEAT_SECONDS = 5.0  # between two writes of it while nothing happens: a sign of life


@dataclass
class Counts:
    """Since this process started."""

    samples: int = 0  # of this worker's segments, seen in the dataset
    segments: int = 0
    commits: int = 0  # made by this process, for whichever worker
    duplicates: int = 0  # samples that the dataset had already
    already_committed: int = 0  # segments of a former process that died before it deleted them
    gone: int = 0  # segments that the spool deleted first
    corrupt: int = 0  # segments, set aside as *.bad with a report
    refused: int = 0  # segments of another stream, set aside as *.refused
    raced: int = 0  # commits that another committer preceded
    dropped_batches: int = 0  # written in vain: another worker's batch had samples of them
    bad_entries: int = 0  # pending entries set aside
    damaged: int = 0  # samples read back wrong after their commit, and stored again
    leases_taken: int = 0  # from a committer that had died or stood still
    store_failures: int = 0

    def to_json(self) -> dict[str, int]:
        return asdict(self)
