"""The one typed configuration of a deployment: every setting, its unit and its default."""

from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from tide_platform.config.cluster import Cluster
from tide_platform.config.section import Section

CONFIG_VERSION = 1


class Serving(Section):
    """The SGLang server: what it serves and how it is started."""

    device: Literal["cpu", "cuda", "rocm"] = "cpu"
    host: str = "127.0.0.1"
    port: int = Field(default=30000, ge=1, le=55535)  # SGLang takes port + 10000 as well, for gRPC
    python: Path | None = (
        None  # interpreter with SGLang; None: .venv-serving beside the project, else this one
    )
    k: int = Field(default=2, ge=0, le=16)  # speculative steps; 0 serves the target alone
    adaptive: bool = False  # SGLang changes k between rounds, by batch size and acceptance
    # its JSON file of candidate steps; None: made from the cost model, or SGLang's own (docs/speculation.md)
    adaptive_config: Path | None = None
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    context_length: int = Field(default=1024, ge=16)
    max_running_requests: int = Field(default=16, ge=1)
    # KV cache slots; None lets SGLang measure (GPU)
    max_total_tokens: int | None = Field(default=16384, ge=64)
    radix_cache: bool = True
    chunked_prefill_size: int = 2048  # tokens; -1 never splits a prompt
    overlap_schedule: bool = False  # on a GPU, with a draft: untested together with capture
    threads: int = Field(default=2, ge=1)  # OMP_NUM_THREADS of the server
    tp_size: int = Field(default=1, ge=1)
    # data-parallel ranks, each with its own requests: replicas of tp_size GPUs, or with dp_attention the
    # attention of a part of the tp_size GPUs each (docs/capture.md)
    dp_size: int = Field(default=1, ge=1)
    dp_attention: bool = False
    attention_backend: str | None = None  # None: torch_native on CPU, else SGLang's own choice
    reasoning_parser: str | None = None  # of the target's thinking, by SGLang's name
    tool_call_parser: str | None = None  # of the target's tool calls, by SGLang's name
    accept_lossy: bool = False  # serve although the verify rule changes what is said
    accept_threshold_single: float = Field(default=1.0, gt=0, le=1)  # below 1 is lossy
    accept_threshold_acc: float = Field(default=1.0, gt=0, le=1)  # below 1 is lossy
    ready_timeout_s: float = Field(default=300, gt=0)
    log_level: str = "warning"


class Capture(Section):
    """What the server logs of its traffic (see docs/capture.md)."""

    enabled: bool = True
    default: Literal["allow", "deny"] = "allow"  # for requests that do not say
    sampling_rate: float = Field(default=1.0, ge=0, le=1)  # share of requests kept, by hash of the request
    deny_tenants: list[str] = []  # tenants that are never captured, whatever a request says
    allow_tenants: list[str] | None = None  # only these are captured; None: all but the denied ones
    # networks whose word on tenant, conversation and consent is taken; `deny` is taken from anyone
    trusted_proxies: list[IPv4Network | IPv6Network] = [IPv4Network("127.0.0.0/8"), IPv6Network("::1/128")]
    bytes_per_second: int | None = Field(default=None, ge=0)  # into the ring; None: no limit
    prompt_tail_tokens: int | None = Field(default=None, ge=1)  # kept of a longer prompt; None: all of it
    max_request_tokens: int | None = Field(default=None, ge=1)  # longer requests are not captured
    teacher_k: int = Field(default=16, ge=1, le=128)  # top-K log-probabilities kept a row
    # last_hidden: the target's final state of each teacher row as well, 2 bytes a feature (docs/capture.md)
    target_signal: Literal["topk", "last_hidden"] = "topk"
    # how the aux states of training rows are stored; validation and reference rows stay bf16. Both defaults
    # are the smallest that cost no acceptance (docs/benchmarks.md)
    aux_format: Literal["bf16", "int8", "int4"] = "int4"
    ring_bytes: int = Field(default=256 << 20, ge=1 << 20)  # shared memory between server and spool
    # a longer request is stored as stretches of this length
    max_sample_tokens: int = Field(default=4096, ge=16)
    segment_bytes: int = Field(default=32 << 20, ge=1 << 16)  # a segment is sealed at this size ...
    segment_seconds: float = Field(default=2.0, gt=0)  # ... or at this age
    # sealed segments that wait for ingest; beyond, the oldest is deleted and counted
    spool_bytes: int = Field(default=8 << 30, ge=1 << 20)


class Storage(Section):
    """Where the dataset and the checkpoints live: ``s3://bucket/prefix`` or a local folder."""

    uri: str = ".tide/store"
    endpoint: str | None = (
        None  # of an S3 store that is not AWS; keys come from AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY
    )
    region: str = "us-east-1"


class Ingest(Section):
    """Sealed segments into the dataset (`tide ingest`)."""

    commit_bytes: int = Field(default=64 << 20, ge=1 << 16)  # a commit holds about so many at most
    commit_seconds: float = Field(default=2.0, ge=0)  # ... and waits for no more than so long
    poll_seconds: float = Field(default=0.5, gt=0)
    # a committer that gave no sign of life for so long is replaced by another worker
    lease_seconds: float = Field(default=10.0, gt=0)
    # of the samples are read back whole and compared before their segments are deleted; all are looked for
    read_back_share: float = Field(default=0.02, ge=0, le=1)


class Retention(Section):
    """How long samples are kept (see docs/storage.md); expiry does not wait for windows that use them."""

    days: float | None = Field(default=None, gt=0)  # None: for ever
    tenants: dict[str, float] = {}  # hours, for tenants that have a rule of their own


class Maintain(Section):
    """Upkeep of the dataset (`tide maintain`)."""

    # `tide ingest` does it so often, between its commits; 0 leaves it to `tide maintain`
    interval_s: float = Field(default=60.0, ge=0)
    max_fragments: int = Field(default=500, ge=8)
    # versions younger than this stay, for readers; each poll and commit lists up to a thousand of them
    keep_hours: float = Field(default=0.25, gt=0)
    orphan_hours: float = Field(default=24.0, ge=1)  # files of dead writers are removed at this age
    # master of a SeaweedFS whose deleted bytes are to be given back
    vacuum_url: str | None = None


class Window(Section):
    """When samples become a training run."""

    min_samples: int = Field(default=256, ge=2)
    # fewer samples are a window as well once they have so many tokens; None: samples alone count
    min_tokens: int | None = Field(default=None, ge=1)
    # fewer samples are a window as well when live acceptance has fallen; None: a fall alone trains nothing
    drift_samples: int | None = Field(default=None, ge=2)
    # when windows land faster than they are trained: train the newest alone, the newest with the samples of
    # those before it, or every one in turn
    policy: Literal["latest", "merge", "all"] = "merge"
    max_samples: int = Field(default=1024, ge=2)  # of a merged window; older ones are superseded
    keep_partitions: int = Field(default=1000, ge=10)  # of windows at their end, in Dagster's pages
    validation_share: float = Field(default=0.15, gt=0, lt=1)  # by hash of the request
    max_attempts: int = Field(default=3, ge=1)
    sensor_seconds: int = Field(default=5, ge=1)
    # a launched run that has not taken its window by then is given up
    start_timeout_s: float = Field(default=180, gt=0)
    # a run that gave no sign of life for so long is taken for dead
    lease_s: float = Field(default=120, ge=10)
    retry_s: float = Field(default=15, ge=0)  # before the second attempt; twice as long before each later one


class Training(Section):
    """Training of drafts (see docs/training.md)."""

    unroll_steps: int = Field(default=3, ge=1, le=8)  # draft steps the objective unrolls (design: K)
    # what the draft learns from: captured top-K, or the captured last hidden state through the target's head
    teacher: Literal["topk", "last_hidden"] = "topk"
    epochs: int = Field(default=4, ge=1)
    batch_size: int = Field(default=8, ge=1)  # samples an optimizer step
    learning_rate: float = Field(default=3e-4, gt=0)
    lr_schedule: Literal["cosine", "constant"] = "cosine"  # after the warm-up
    warmup_ratio: float = Field(default=0.05, ge=0, lt=1)  # of the steps
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)  # where the cosine ends, of learning_rate
    max_grad_norm: float = Field(default=1.0, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    max_length: int = Field(default=1024, ge=16)  # tokens of a sample used in training
    # reference samples replayed for each sample of the window
    reference_ratio: float = Field(default=1.0, ge=0)
    # samples of earlier windows replayed for each sample of the window
    past_window_ratio: float = Field(default=0.25, ge=0)
    # of the samples may be left out because they are damaged; more end the run
    max_damaged_share: float = Field(default=0.1, ge=0, le=1)
    # between checkpoints; a run that dies computes so much again and loses nothing. 0: after every step, as
    # far as that takes less than 5 % of the time
    checkpoint_seconds: float = Field(default=60.0, ge=0)
    prefetch_steps: int = Field(default=4, ge=1)  # steps whose samples are read ahead
    cache_bytes: int = Field(
        default=2 << 30, ge=0
    )  # of samples kept in each process's memory for later epochs
    autocast: bool = True  # bf16 matrix products, fp32 masters
    device: Literal["auto", "cpu", "cuda"] = "auto"  # cuda is ROCm's name too; auto: a GPU where there is one
    # of several processes: each holds all weights (DDP), or a shard of weights and moments (FSDP2)
    parallel: Literal["replicate", "shard"] = "replicate"
    # of a micro-batch, each sample counted as the longest: memory, never the result
    micro_batch_positions: int = Field(default=8192, ge=64)
    threads: int = Field(default=2, ge=1)
    seed: int = 0


class Gate(Section):
    """Champion against challenger (acceptance replay, paired)."""

    confidence: float = Field(default=0.95, gt=0.5, lt=1)
    # challenger/champion predicted tokens a second - 1, lower bound, on the window (docs/evaluation.md)
    min_gain: float = Field(default=0.02, ge=0)
    # batch sizes that tokens a second are predicted for: those of so many hours of decode steps
    histogram_hours: float = Field(default=24.0, gt=0)
    # challenger/champion acceptance length on the reference set
    reference_floor: float = Field(default=0.95, gt=0, le=1)
    # the same on each slice of the window (tenant, prompt length, flags, temperature) ...
    slice_floor: float = Field(default=0.95, gt=0, le=1)
    slice_requests: int = Field(default=20, ge=2)  # ... that has so many requests
    # each cycle's consistency check runs the whole of `tide gate`, with a server of its own: minutes more
    own_server: bool = False


class Rollout(Section):
    """A new draft's way to the servers (see docs/control.md)."""

    # base URLs of all servers of the deployment, the canary first; empty: the one that `serving` describes
    servers: list[str] = []
    # the canary is watched until so many of its requests have ended, or for so long
    watch_requests: int = Field(default=200, ge=1)
    watch_seconds: float = Field(default=60.0, ge=0)
    idle_seconds: float = Field(default=10.0, ge=0)  # without a finished request: nothing to wait for
    wave_share: float = Field(default=0.5, gt=0, le=1)  # of the other servers, at a time
    # what counts as worse than the champion, and how sure that must be
    confidence: float = Field(default=0.99, gt=0.5, lt=1)
    max_loss: float = Field(default=0.05, ge=0, lt=1)  # of acceptance length
    max_slowdown: float = Field(default=0.25, ge=0)  # of the time a token, median and 99th percentile
    max_aborts: float = Field(default=0.05, ge=0, le=1)  # further share of requests that are aborted


class Watch(Section):
    """The served draft, watched for as long as it is served (see docs/control.md)."""

    sensor_seconds: int = Field(default=10, ge=1)
    # for one answer of a server to a sensor's tick; one that hangs is looked at again with the next
    answer_seconds: float = Field(default=10.0, gt=0)
    # of a new champion: frozen, its later acceptance is compared with theirs
    reference_requests: int = Field(default=200, ge=10)
    recent_requests: int = Field(default=200, ge=10)  # the newest ones, which are compared
    slice_requests: int = Field(default=30, ge=10)  # a tenant with fewer newest ones is not looked at alone
    confidence: float = Field(default=0.99, gt=0.5, lt=1)
    max_loss: float = Field(default=0.05, ge=0, lt=1)  # of acceptance length, before it counts as a drift
    # the draft before is replayed beside a champion that fell, on so many of its newest samples
    replay_samples: int = Field(default=64, ge=16)  # mend.LEAST_SAMPLES
    # acceptance length of the draft before / champion's - 1, lower bound: it is served again
    rollback_gain: float = Field(default=0.02, ge=0)
    mend_seconds: float = Field(default=60.0, ge=0)  # between two runs that mend
    # the measured speed-up over no speculation: over so many minutes, by batch sizes with so many requests
    speed_minutes: float = Field(default=10.0, gt=0)
    speed_requests: int = Field(default=30, ge=1)


class Collection(Section):
    """When the servers capture (see docs/control.md)."""

    # auto: off when training stops paying, on again when live acceptance falls
    mode: Literal["auto", "always"] = "auto"
    patience: int = Field(default=3, ge=1)  # rejected challengers in a row until training does not pay


class Schedule(Section):
    """What Dagster starts by the clock (see docs/dagster.md), and when it calls an asset stale."""

    # cron strings, in the time zone
    maintenance: str = "15 3 * * *"
    evaluation: str = "45 3 * * *"  # of the served draft on the reference set
    time_zone: str = "UTC"
    # hours without a new window, without a newly served draft: the asset's page says that it is stale
    hidden_states_hours: float = Field(default=48.0, ge=0.02)
    serving_draft_hours: float = Field(default=336.0, ge=0.02)


class Notify(Section):
    """Who is told of what happened (see docs/dagster.md). Addresses hold secrets, so they are no settings:
    they come from the variable TIDE_NOTIFY__URLS, or from ``urls_file``.
    """

    urls_file: Path | None = None  # one address a line, as the apprise library writes them
    # of the audit (`tide audit`): what is told of
    actions: list[str] = ["rolled back", "failed", "frozen", "mended"]
    tries: int = Field(default=3, ge=1, le=10)  # at one address, within one look
    timeout_s: float = Field(default=10.0, gt=0)  # of one try
    # what no address has taken is tried again with the next look, until it is so old
    give_up_s: float = Field(default=3600.0, ge=0)
    sensor_seconds: int = Field(default=30, ge=1)  # between two looks
    # what is not as it should be (a server that does not answer, a rollout that stands still) is told of when
    # it has stood for so long
    patience_s: float = Field(default=300.0, ge=0)


class Registry(Section):
    tracking_uri: str = "sqlite:///.tide/mlflow.db"
    experiment: str = "tide-drafts"


class Ledger(Section):
    url: str = "sqlite:///.tide/ledger.db"  # SQLAlchemy URL


class Metrics(Section):
    """What `tide metrics` tells Prometheus, and how often it looks (see docs/metrics.md)."""

    host: str = "127.0.0.1"
    port: int = Field(default=9464, ge=1, le=65535)
    # on one machine all; in a cluster an exporter without `files`, and one of `files` alone beside each spool
    parts: list[Literal["ledger", "live", "controls", "servers", "dataset", "files"]] = [
        "ledger",
        "live",
        "controls",
        "servers",
        "dataset",
        "files",
    ]
    scrape_seconds: float = Field(default=5.0, gt=0)  # an answer takes no longer, whatever hangs
    interval_seconds: float = Field(default=5.0, ge=0)  # ledger, servers and files are read so often at most
    store_seconds: float = Field(default=60.0, ge=0)  # ... and the dataset
    live_seconds: float = Field(default=900.0, gt=0)  # that live figures which are no counters look back
    # live counters of a draft, tenant and batch size are told for so long after their last request, and of
    # so many of them at most
    live_hours: float = Field(default=24.0, gt=0)
    live_groups: int = Field(default=500, ge=1)
    dead_seconds: float = Field(default=60.0, gt=0)  # a process whose status file is older is taken for dead


class Stack(Section):
    """Ports of the local stack (`tide stack`, `tide demo`) on 127.0.0.1; the server's is serving.port."""

    s3_port: int = Field(default=8333, ge=1, le=65535)
    mlflow_port: int = Field(default=5050, ge=1, le=65535)
    dagster_port: int = Field(default=3070, ge=1, le=65535)
    ready_timeout_s: float = Field(default=300, gt=0)  # for each service but the server


class Settings(Section):
    """A deployment: one served target with its line of drafts."""

    config_version: Literal[1] = CONFIG_VERSION
    deployment: str = Field(default="demo", pattern=r"^[a-z0-9]([a-z0-9-]{0,39}[a-z0-9])?$")
    target: Path | None = None  # a Hugging Face folder; None: the prepared SmolLM2-135M-Instruct
    draft: Path | None = None  # the first champion; None: the draft that ships with the project
    state: Path = Path(".tide")  # spool, staged drafts, logs, sockets
    serving: Serving = Serving()
    capture: Capture = Capture()
    storage: Storage = Storage()
    ingest: Ingest = Ingest()
    retention: Retention = Retention()
    maintain: Maintain = Maintain()
    window: Window = Window()
    training: Training = Training()
    gate: Gate = Gate()
    rollout: Rollout = Rollout()
    watch: Watch = Watch()
    collection: Collection = Collection()
    schedule: Schedule = Schedule()
    notify: Notify = Notify()
    registry: Registry = Registry()
    ledger: Ledger = Ledger()
    metrics: Metrics = Metrics()
    stack: Stack = Stack()
    cluster: Cluster | None = None  # None: processes on this machine

    @model_validator(mode="after")
    def _sample_fits_context(self) -> "Settings":
        if self.capture.ring_bytes < self.capture.segment_bytes:
            raise ValueError("capture.ring_bytes must not be smaller than capture.segment_bytes")
        return self

    @property
    def spool_folder(self) -> Path:
        return self.state / "spool"

    @property
    def drafts_folder(self) -> Path:
        """The only root that the server loads drafts from."""
        return self.state / "drafts"
