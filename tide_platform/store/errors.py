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


class StreamMismatch(StoreError):
    """Samples of another target, or of another shape, than the dataset's."""

    def __init__(self, uri: str, ours: StreamMeta, theirs: StreamMeta):
        differing = [name for name, value in ours.to_json().items() if theirs.to_json()[name] != value]
        values = ", ".join(
            f"{name} {getattr(ours, name)} against {getattr(theirs, name)}" for name in differing
        )
        super().__init__(
            f"{uri}: holds samples of another stream: {values} (dataset against samples); serve the other "
            "target under its own `deployment` name"
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
            "one that honours conditional puts (AWS S3, SeaweedFS, MinIO, Ceph, R2)"
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
