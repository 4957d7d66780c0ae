"""What the store raises; each names the thing that is wrong and the mend."""

from tide_platform.capture.record import StreamMeta
from tide_platform.config import TideError


class StoreError(TideError):
    """The root of the store's errors."""


class StoreUnavailable(StoreError):
    """The store did not answer, or answered with a failure of its own; the same call may succeed later."""

    def __init__(self, uri: str, what: str):
        super().__init__(
            f"{uri}: the store failed: {what}; check that it runs and that storage.endpoint is right"
        )
        self.uri, self.what = uri, what


class StoreRefused(StoreError):
    """The store knows the caller's keys but does not let it, or does not know them."""

    def __init__(self, uri: str, what: str):
        super().__init__(
            f"{uri}: refused: {what}; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY to keys that may "
            "read and write there"
        )
        self.uri, self.what = uri, what


class NoDataset(StoreError):
    """Nothing was captured yet."""

    def __init__(self, uri: str):
        super().__init__(f"{uri}: no such dataset yet; it is made when the first captured sample arrives")
        self.uri = uri


class VersionGone(StoreError):
    """A version that upkeep removed; its rows that have not expired are in the newest one."""

    def __init__(self, uri: str, version: int):
        super().__init__(f"{uri}: no version {version}: it was cleaned up or never was; read the newest")
        self.uri, self.version = uri, version


class CommitRaced(StoreError):
    """Another commit took place since the version that this one was prepared on; nothing was committed."""

    def __init__(self, uri: str, version: int, what: str):
        super().__init__(f"{uri}: version {version} is outdated: {what}; read the newest and commit again")
        self.uri, self.version = uri, version


class ManifestDamaged(StoreError):
    """The newest version cannot be read, as a power cut leaves it."""

    def __init__(self, uri: str, what: str):
        super().__init__(
            f"{uri}: its newest version cannot be read ({what}); `tide maintain --once` sets it aside and "
            "says what is lost"
        )
        self.uri, self.what = uri, what


class EntryCorrupt(StoreError):
    """A pending entry whose bytes are not those that were written."""

    def __init__(self, uri: str, what: str):
        super().__init__(f"{uri}: {what}; its writer stores the samples again")
        self.uri, self.what = uri, what


class SampleReleased(StoreError):
    """Samples that this consumer has given up, or whose batch was aborted."""

    def __init__(self, uri: str, sample_ids: list[str]):
        some = ", ".join(sample_ids[:3]) + (" …" if len(sample_ids) > 3 else "")
        super().__init__(f"{uri}: {len(sample_ids)} samples were released or aborted: {some}; put them again")
        self.uri, self.sample_ids = uri, sample_ids


class StaleGeneration(StoreError):
    """A key of an earlier put of the same sample."""

    def __init__(self, uri: str, sample_id: str, asked: int, current: int):
        super().__init__(
            f"{uri}: sample {sample_id}: generation {asked} was replaced by {current}; ask with the key "
            "that the last put returned"
        )
        self.uri, self.sample_id, self.asked, self.current = uri, sample_id, asked, current


class BudgetExceeded(StoreError):
    """A put that the store's byte budget has no room for; nothing of it was stored."""

    def __init__(self, uri: str, wanted: int, used: int, budget: int):
        super().__init__(
            f"{uri}: {wanted} bytes do not fit: {used} of {budget} are used; release samples and run gc, or "
            "raise the budget"
        )
        self.uri, self.wanted, self.used, self.budget = uri, wanted, used, budget


class StreamMismatch(StoreError):
    """Samples of another target, or of another shape, than the dataset's."""

    def __init__(self, uri: str, ours: StreamMeta, theirs: StreamMeta):
        differing = [name for name, value in ours.to_json().items() if theirs.to_json()[name] != value]
        values = ", ".join(
            f"{name} {getattr(ours, name)} against {getattr(theirs, name)}" for name in differing
        )
        mend = "serve the other target under its own `deployment` name"
        if differing == ["target_signal"]:
            mend = f"set capture.target_signal: {ours.target_signal}, or another `deployment` name"
        super().__init__(
            f"{uri}: holds samples of another stream: {values} (dataset against samples); {mend}"
        )
        self.uri, self.ours, self.theirs, self.differing = uri, ours, theirs, differing


class SamplesMissing(StoreError):
    """Samples that were asked for and are not, or no longer, in the dataset."""

    def __init__(self, uri: str, sample_ids: list[str]):
        some = ", ".join(sample_ids[:3]) + (" …" if len(sample_ids) > 3 else "")
        super().__init__(
            f"{uri}: {len(sample_ids)} samples are not there: {some}; `tide samples list` shows those that "
            "are"
        )
        self.uri, self.sample_ids = uri, sample_ids


class BlobCorrupt(StoreError):
    """A stored tensor whose bytes are not those that were written."""

    def __init__(self, uri: str, sample_id: str, column: str):
        super().__init__(
            f"{uri}: {column} of sample {sample_id}: wrong length or checksum; the storage damaged it, leave "
            "the sample out"
        )
        self.uri, self.sample_id, self.column = uri, sample_id, column


class ConditionalPutIgnored(StoreError):
    """An object store on which Lance would lose commits silently."""

    def __init__(self, uri: str):
        super().__init__(
            f"{uri}: this store ignores If-None-Match, so two commits can overwrite each other unseen; use "
            "one that honours conditional puts (AWS S3, SeaweedFS, MinIO, Ceph, R2), or a local folder"
        )
        self.uri = uri


class ObjectMissing(StoreError):
    def __init__(self, uri: str):
        super().__init__(f"{uri}: no such object")
        self.uri = uri


class ObjectCorrupt(StoreError):
    """A file whose SHA-256 is not the one noted when it was stored."""

    def __init__(self, uri: str, expected: str, found: str):
        super().__init__(
            f"{uri}: SHA-256 is {found[:12]}…, {expected[:12]}… was stored; fetch or store it again"
        )
        self.uri, self.expected, self.found = uri, expected, found
