"""What can be wrong with a file of conversations, by name. Every text says what to do."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from tide_platform.config import TideError

KNOWN = (
    "sharegpt (`conversations: [{from, value}]`), openai (`messages: [{role, content}]`), "
    "tokens (`input_ids`, `loss_mask`)"
)


class BadRecord(Exception):
    """One record that cannot be used; ``reason`` goes beside it into the file of rejected records."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


class CorpusError(TideError):
    """A file that cannot be used; ``path`` is the one meant."""

    def __init__(self, path: Path, text: str):
        super().__init__(f"{path}: {text}")
        self.path = path


class CorpusUnreadable(CorpusError):
    """No such file, an empty one, or one that is broken as a whole."""


class UnknownFormat(CorpusError):
    """None of the first records has the columns of a known format."""

    def __init__(self, path: Path, columns: Sequence[str]):
        seen = ", ".join(columns) or "no objects"
        super().__init__(path, f"found columns {seen}; known formats: {KNOWN}. Rename the columns to one")
        self.columns = tuple(columns)


class MixedFormats(CorpusError):
    """The first records are of several formats."""

    def __init__(self, path: Path, first_of: Mapping[str, int]):
        where = ", ".join(f"{kind} (first: record {number})" for kind, number in first_of.items())
        super().__init__(
            path, f"its first records mix formats: {where}; split the file, or name one with --format"
        )
        self.first_of = dict(first_of)


class FormatMismatch(CorpusError):
    """The records are not of the format that was asked for."""

    def __init__(self, path: Path, asked: str, found: str, columns: Sequence[str]):
        mend = (
            "leave --preformatted out: the target's template is applied to conversations"
            if asked == "text"
            else "`text` holds texts that a template was applied to: give --preformatted"
            if found == "text"
            else f"give --format {found}"
        )
        super().__init__(
            path, f"asked for {asked}, but its columns are {', '.join(columns)}, which is {found}; {mend}"
        )
        self.asked, self.found, self.columns = asked, found, tuple(columns)


class TooManyRejected(CorpusError):
    """More than a bounded share of the records cannot be used."""

    def __init__(self, path: Path, rejected: int, records: int, share: float, first: str, aside: Path):
        super().__init__(
            path,
            f"{rejected} of {records} records cannot be used, more than {share:.0%} (the first: {first}); "
            f"see {aside}, mend them, or raise --max-rejected",
        )
        self.rejected, self.records, self.share = rejected, records, share


class NothingMasked(CorpusError):
    """Not one token is a response: 0 % mask coverage, nothing to learn from."""

    def __init__(self, path: Path, records: int, why: str, mend: str):
        super().__init__(path, f"mask coverage is 0 % over {records} records: {why}; {mend}")
        self.records, self.why = records, why


class AllTruncated(CorpusError):
    """Every record is cut off before its first answer."""

    def __init__(self, path: Path, records: int, max_length: int):
        super().__init__(
            path,
            f"all {records} records are truncated at {max_length} tokens before an answer begins; "
            "raise --max-length, or shorten the prompts",
        )
        self.records, self.max_length = records, max_length


class NotPrepared(CorpusError):
    """A file that `tide data prepare` did not finish, or of another version."""

    def __init__(self, path: Path, why: str):
        super().__init__(path, f"{why}; make it with `tide data prepare`")
        self.why = why


class OtherTarget(CorpusError):
    """Prepared for one target, used with another: its tokens mean something else there."""

    def __init__(self, path: Path, prepared_for: str, target: Path, digest: str):
        super().__init__(
            path,
            f"was prepared for target {prepared_for}, {target} is {digest}; prepare it again for this target",
        )
        self.prepared_for, self.target, self.digest = prepared_for, target, digest


class TemplateNotIncremental(TideError):
    """The chat template does not render a conversation as a continuation of its own beginning.

    So where an answer begins in the text cannot be told from the renders.
    """

    def __init__(self, target: Path, digest: str, detail: str):
        super().__init__(
            f"{target}: chat template {digest} is not incremental: {detail}; mark the answers in it with "
            "{% generation %}, or give texts that it was applied to (--preformatted)"
        )
        self.target, self.digest, self.detail = target, digest, detail


class NoOffsets(TideError):
    """The target's tokenizer cannot say which characters a token covers."""

    def __init__(self, target: Path):
        super().__init__(
            f"{target}: its tokenizer gives no character offsets, so answers cannot be masked; "
            "add a tokenizer.json (a fast tokenizer)"
        )
        self.target = target


class NoMarkers(TideError):
    """The chat template puts nothing before an answer, so answers cannot be found in preformatted texts."""

    def __init__(self, target: Path, digest: str):
        super().__init__(
            f"{target}: chat template {digest} has no generation prompt to look for in preformatted texts; "
            "give the conversations themselves"
        )
        self.target, self.digest = target, digest


class StatesNotFinite(TideError):
    """The target gave NaN or infinite states or logits."""

    def __init__(self, sample_id: str, what: str, position: int, dtype: str):
        super().__init__(
            f"sample {sample_id}: {what} at position {position} is not finite in {dtype}; nothing of this "
            "batch was stored: run the target in another precision (--dtype float32), or check its weights"
        )
        self.sample_id, self.what, self.position, self.dtype = sample_id, what, position, dtype


class ResumeMismatch(CorpusError):
    """An output that another run with other settings began."""

    def __init__(self, path: Path, changed: Mapping[str, tuple[object, object]]):
        what = ", ".join(f"{name} was {old}, now {new}" for name, (old, new) in changed.items())
        super().__init__(path, f"was begun with other settings ({what}); write to another file, or remove it")
        self.changed = dict(changed)


class ForeignOutput(CorpusError):
    """A file where answers were to be written, which holds something else."""

    def __init__(self, path: Path, why: str):
        super().__init__(path, f"is in the way: {why}; give another --out, or remove it")
        self.why = why


class RegenerationFailed(TideError):
    """So many requests failed in a row that going on is pointless; what was answered is kept."""

    def __init__(self, failures: int, last: str):
        super().__init__(
            f"{failures} conversations failed in a row, the last: {last}; mend the server and run the same "
            "command again: it goes on where it was"
        )
        self.failures, self.last = failures, last
