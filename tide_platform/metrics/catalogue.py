"""Every metric of the exporter: the code takes names from here, the docs' table is made of it.

Times are Unix times, not ages: an age stands still where nobody computes it any more.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Metric:
    """One family; a counter's name ends with ``_total``."""

    name: str
    kind: Literal["gauge", "counter"]
    what: str
    labels: tuple[str, ...] = ()


def _gauge(name: str, what: str, *labels: str) -> Metric:
    return Metric(f"tide_{name}", "gauge", what, labels)


def _counter(name: str, what: str, *labels: str) -> Metric:
    return Metric(f"tide_{name}_total", "counter", what, labels)


_GROUP = ("draft", "tenant", "batch")

SECTIONS: dict[str, list[Metric]] = {
    "The exporter itself": [
        _gauge("up", "1 where this part of the deployment could be read for this answer.", "what"),
        _counter("unread", "Answers in which it could not, since the exporter started.", "what"),
        _gauge("read_seconds", "That the last finished read took.", "what"),
        _gauge("deployment_info", "1; which deployment, and the platform's version.", "name", "version"),
    ],
    "Windows (`ledger`)": [
        _gauge("windows", "Windows by state.", "state"),
        _gauge(
            "windows_oldest_timestamp_seconds", "When the oldest window of an open state was cut.", "state"
        ),
        _gauge("windows_attempt", "Highest attempt of the open windows; 0 where none is open."),
        _gauge("windows_attempts_allowed", "Setting window.max_attempts."),
        _counter("windows_retries", "Attempts beyond a window's first."),
        _gauge("windows_seen_timestamp_seconds", "Last sign of life of the run that holds a window."),
        _gauge("windows_lease_seconds", "Setting window.lease_s: silent longer, a run is taken for dead."),
        _gauge("windows_samples_wanted", "Setting window.min_samples."),
        _gauge("scan_rows", "Rows of the dataset when the sensor last read new ones."),
        _gauge("scan_pending_samples", "Samples that it has read and that wait for a window."),
    ],
    "Verdicts and deployments (`ledger`)": [
        _counter("verdicts", "Verdicts of the gate: passed, rejected.", "result"),
        _gauge("verdict_gain_ratio", "Gain of the newest verdict's challenger on its window."),
        _gauge("verdict_gain_lower_ratio", "Lower bound of it, which the gate goes by."),
        _gauge("verdict_timestamp_seconds", "When it was judged."),
        _counter("deployments", "Drafts served in place of another, by window, hand or rollback."),
        _gauge("champion_info", "1; the draft that was deployed last.", "draft"),
        _gauge("champion_timestamp_seconds", "Since when it is served."),
        _gauge("champion_promoted_acceptance_length", "Its acceptance length when it was promoted.", "draft"),
        _counter("audit", "Entries of the audit: deployed, rolled back, failed, frozen, ...", "action"),
        _gauge("barred_drafts", "Drafts that are not promoted without a hand."),
        _gauge("frozen", "1 where nothing is promoted by itself."),
        _gauge("rollout_unfinished", "1 where a draft is on its way to the servers."),
        _gauge("rollout_info", "1; which draft, and how far it has come.", "draft", "step"),
        _gauge("rollout_started_timestamp_seconds", "Since when."),
        _gauge("rollout_step_timestamp_seconds", "When it came to this step."),
    ],
    "Live traffic (`live`)": [
        _counter("live_requests", "Finished requests, captured or not.", *_GROUP),
        _counter("live_aborted", "Of them aborted.", *_GROUP),
        _counter("live_tokens", "Tokens of their responses.", *_GROUP),
        _counter("live_rounds", "Verify rounds.", *_GROUP),
        _counter("live_accepted", "Draft tokens accepted in them.", *_GROUP),
        _counter("live_decode_seconds", "Seconds of decoding, summed over the requests.", *_GROUP),
        _counter("live_decoded_tokens", "Tokens behind a request's first, in these seconds.", *_GROUP),
        _gauge("live_acceptance_length", "Over the last metrics.live_seconds.", *_GROUP),
        _gauge(
            "live_token_seconds",
            "Time a token that this share of the requests do not exceed, over the same.",
            *_GROUP,
            "share",
        ),
        _counter("live_missed_requests", "Requests that a server forgot before they were read."),
        _gauge("live_groups_left_out", "Drafts, tenants and batch sizes beyond metrics.live_groups."),
    ],
    "Controls (`controls`)": [
        _gauge("speedup_ratio", "Speed with the draft over speed without, as last known.", "batch"),
    ],
    "Servers (`servers`)": [
        _gauge("server_up", "1 where the server answered.", "server"),
        _gauge("server_info", "1; what it serves.", "server", "draft", "adapter", "verify_rule"),
        _gauge("server_capturing", "1 where it captures.", "server"),
        _counter("server_reloads", "Drafts loaded since it was started.", "server"),
        _gauge("servers_agree", "1 where all answered and serve one draft."),
    ],
    "Dataset (`dataset`)": [
        _gauge("dataset_rows", "Live samples."),
        _gauge("dataset_version", "Newest version: each commit makes one."),
        _gauge("dataset_fragments", "Live fragments; upkeep keeps them below maintain.max_fragments."),
        _gauge("dataset_fragments_allowed", "Setting maintain.max_fragments."),
        _gauge("dataset_data_bytes", "Bytes of its data files; large blobs lie beside them."),
        _gauge("dataset_commit_timestamp_seconds", "When the newest version was committed."),
    ],
    "Spool, ingest, upkeep (`files`)": [
        _gauge("spool_segments", "Sealed segments that wait for ingest."),
        _gauge("spool_bytes", "Bytes of them."),
        _gauge("spool_bytes_allowed", "Setting capture.spool_bytes; beyond, the oldest is deleted."),
        _gauge("spool_oldest_timestamp_seconds", "When the oldest of them was sealed."),
        _gauge("spool_set_aside", "Segments that ingest could not take: bad, refused.", "kind"),
        _counter("spool_samples", "Samples stored in segments by this spool.", "process"),
        _counter("spool_sealed", "Segments sealed by it.", "process"),
        _counter("spool_written_bytes", "Bytes of them.", "process"),
        _counter("spool_disk_errors", "Writes that its disk refused.", "process"),
        _counter("spool_dropped", "Samples lost in the spool.", "process", "reason"),
        _counter("spool_ring_dropped", "Samples that the server lost on the way to it.", "process", "reason"),
        _counter("ingest_events", "What `tide ingest` counts (docs/storage.md).", "process", "event"),
        _counter("upkeep_events", "What upkeep counts, by the process that does it.", "process", "event"),
        _gauge("process_alive", "1 where its status file is younger than metrics.dead_seconds.", "process"),
        _gauge("process_seen_timestamp_seconds", "When it last wrote its status file.", "process"),
    ],
    "Training (`files`)": [
        _gauge("training_step", "Acknowledged optimizer steps of the run that writes now.", "window"),
        _gauge("training_steps", "Steps that it will take.", "window"),
        _gauge("training_loss", "Loss of the last of them, nats.", "window"),
        _gauge("training_tokens", "Response tokens that it has seen.", "window"),
        _gauge("training_seen_timestamp_seconds", "When it acknowledged the last step.", "window"),
    ],
}
CATALOGUE = {metric.name: metric for metrics in SECTIONS.values() for metric in metrics}


def markdown_tables() -> str:
    """The tables of docs/metrics.md."""
    lines: list[str] = []
    for title, metrics in SECTIONS.items():
        lines += [f"### {title}", "", "| metric | labels | |", "| --- | --- | --- |"]
        lines += [f"| `{metric.name}` | {', '.join(metric.labels)} | {metric.what} |" for metric in metrics]
        lines.append("")
    return "\n".join(lines)
