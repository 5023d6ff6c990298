"""Every setting of Baton: frozen dataclasses, units last in names. `resolve()` decides each "auto" once and returns
what it decided. Environment variables are read in `env.py` and nowhere else.

Owns: the settings, and their types. Never: whether they can work (`config_checks.py`), a default that depends on the
machine (that is `resolve`'s to decide and to report), or a change after start.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from baton.common.by_name import ByName
from baton.common.errors import ConfigError
from baton.common.http_config import HttpConfig
from baton.common.kv.cache_dtype import CacheDtype
from baton.common.kv.page_layout import LayoutChoice
from baton.common.kv.prefix.names import PrefixCacheName
from baton.common.routing_config import KvEventsConfig, RoutingConfig

FAKE_MODEL = "fake"
"""The model that needs no weights: its tokens are hashes of the pages it reads (`engine/fake_runner.py`)."""
PAGE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
LANES = ("local", "ucx", "tcp", "zmq")
"""What a worker has unless it is told otherwise."""
DEVICE_LANES = ("cuda_ipc",)
"""What it has if it is told to, and its pools lie on a GPU."""
MAX_TCP_STREAMS = 16
LaneChoice = Literal["measured", "order"]
DigestKind = Literal["sampled", "full"]
KvReturn = Literal["adaptive", "on", "off"]
POSTGRES = ("postgresql://", "postgres://")
"""How the address of a job store on a server begins."""
MAX_PRIORITY = 100
"""And its negative, of a request: `baton.common.messages.Priority`."""
MAX_REQUEST_S = 1e6
"""What a request may be given at most; a frame that says more is malformed."""
MAX_PAGES = (1 << 31) - 1  # page ids are int32, the null page is one of them
NODE_ADDRESS = "node"
"""A `bind_host` that is another one on each node: the address by which Ray's nodes know it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(ByName):
    """`model` is a built-in name ("smollm2-135m-instruct", "fake"), a Hugging Face directory, or a .gguf file."""

    model: str = "smollm2-135m-instruct"
    dtype: Literal["float32", "bfloat16"] = "float32"
    max_model_len: int | None = None  # None: what the model can, at most what a pool holds
    device: Literal["cpu", "cuda"] = "cpu"  # where it computes and keeps pages; cuda: not run yet (docs/GPU.md)
    # auto: compiled where a C++ compiler is, else torch; on cuda flashinfer, triton or torch, as the worker has them
    attention: Literal["auto", "compiled", "torch", "triton", "flashinfer"] = "auto"
    graph_rows: int = 64  # on cuda: decode steps of up to so many rows are CUDA graphs; 0: none are
    weights: Literal["dtype", "int8"] = "dtype"  # int8: of linear layers, rounded once; half the bytes of bfloat16
    forward_path: Literal["fastest", "fused", "generic"] = "fastest"  # fastest: fused for architectures that have it
    thinking_start: str = "<think>"  # the token that begins a reasoning model's thinking


@dataclass(frozen=True, slots=True, kw_only=True)
class TiersConfig(ByName):
    """Where a decode worker keeps copies of cached pages below its pool. Off unless a level is named. Only for models
    whose layers all attend to every token."""

    host_bytes: int = 0  # host memory per decode worker; committed as it fills
    disk_path: str = ""  # a local directory; each decode worker has its own below it, which survives restarts
    disk_bytes: int = 16 << 30  # per decode worker
    external: str = ""  # file:///directory, shared by all decode workers, of other hosts too if it is mounted there
    external_bytes: int = 64 << 30  # of all together
    write: Literal["through", "back"] = "through"  # to every level once cached; or one down, before it is given up
    restore_min_pages: int = 2  # fewer are not worth asking for: a prefill worker sends them with the rest
    restore_deadline_s: float = 2.0  # a slower restore, or copy that others wait for, is cut short; what landed stays
    max_queued_jobs: int = 64  # stores beyond it are dropped, restores come back empty

    @property
    def named(self) -> bool:
        """Whether there is any level."""
        return bool(self.bounds)

    @property
    def bounds(self) -> dict[str, int]:
        """Most bytes of each level that there is, by the name of the setting."""
        levels = (
            ("host_bytes", self.host_bytes, self.host_bytes),
            ("disk_bytes", self.disk_path, self.disk_bytes),
            ("external_bytes", self.external, self.external_bytes),
        )
        return {name: most for name, wanted, most in levels if wanted}


@dataclass(frozen=True, slots=True, kw_only=True)
class KvConfig(ByName):
    """One worker's pool. The counts win over `pool_bytes`, of which they are made else (`kv/sizing.py`). Page 0 (the
    null page) comes on top."""

    page_size: int = 16
    page_layout: LayoutChoice = "auto"  # auto: panels where compiled kernels attend; int8, fp8: as cache_dtype says
    cache_dtype: CacheDtype = "auto"  # auto: model.dtype; int8, fp8: a byte per number, twice the pages of bfloat16
    pool_bytes: int = 768 << 20
    num_pages: int | None = None  # of the layers that attend to everything; of the model's first kind of layers else
    swa_pages: int | None = None  # sliding-window layers beside those
    state_slots: int | None = None  # recurrent layers beside those: one per sequence, and per checkpoint
    prefix_cache: PrefixCacheName = "radix"  # radix, chunk (nothing is shared), or a name that fits only some models
    strip_thinking_cache: bool = False  # answers that began by thinking are not cached: the next turn has no thinking
    tiers: TiersConfig = field(default_factory=TiersConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig(ByName):
    chunk_tokens: int = 512  # most query tokens in one step, over all its rows
    chunk_target_s: float = 0.0  # fewer where a step would take longer, by a profile made at start; 0: no profile
    max_queued_requests: int = 256
    # A prompt's last pages are sent in so many groups of layers, each as soon as it is computed; adaptive: for each
    # prompt as many as pay off, by the lane's speed and the time that the chunk takes.
    layer_groups: Literal["adaptive"] | int = "adaptive"
    kv_return: KvReturn = "adaptive"  # what a decode worker has of a conversation is asked back: where that is faster
    grace_s: float = 5.0  # what was computed for a decode worker that was lost is kept so long for the next; 0: not


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig(ByName):
    max_running_requests: int = 64
    max_queued_requests: int = 1024
    num_reserved_decode_tokens: int = 512  # room for growth kept per active request at admission
    local_prefill_max_tokens: int = 0  # uncached prompt parts up to this are prefilled here, not handed over
    chunk_tokens: int = 256  # most query tokens of a local prefill in one step
    itl_s: float | None = None  # fewer where streams would wait longer for their next token, or twice as long as alone
    # where that is more; None: autoscale.itl_s; 0: no fewer
    chunk_target_s: float = 0.0  # in place of itl_s: by a profile made at start, as of prefill workers
    max_sessions: int = 256  # conversations whose KV is kept between turns; 0: none
    session_ttl_s: float = 600.0  # and so long
    lost_session: Literal["prefill", "fail"] = "prefill"  # a later turn whose KV is gone: computed again, or refused


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneCapsConfig(ByName):
    """Gigabytes (1e9) per second on each lane, in each direction; 0: no limit."""

    cuda_ipc: float = 0.0
    local: float = 0.0
    ucx: float = 0.0
    tcp: float = 0.0
    zmq: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferConfig(ByName):
    lanes: tuple[str, ...] = LANES  # in order of preference; the last resort is always "zmq". cuda_ipc, between
    # workers on one GPU, has to be named (not yet run on one)
    lane_choice: LaneChoice = "measured"  # measured: a lane that is clearly faster comes before the order
    staging_ring_bytes: int = 64 << 20  # receiver-owned
    region_bytes: int = 4 << 20  # most bytes in one region, and the size of a staging slot
    direct_region_bytes: int = 16 << 20  # most bytes in one region on a lane without staging (local, tcp)
    credit_regions: int = 4  # regions in flight per hand-off
    tcp_streams: int = 1  # connections of the tcp lane from each receiver to each source
    max_gbps: float = 0.0  # gigabytes (1e9) per second that a worker sends at most, and receives; 0: no limit
    lane_max_gbps: LaneCapsConfig = field(default_factory=LaneCapsConfig)
    digest: DigestKind = "sampled"  # what both ends compare of a region: a sample of its bytes, or all (full)
    resend_after_s: float = 0.5
    handoff_ttl_s: float = 300.0  # most time one attempt may take, queueing at prefill included; a dead or hung
    # peer is noticed by its silence long before
    tombstone_ttl_s: float = 120.0
    max_tombstones: int = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class LivenessConfig(ByName):
    heartbeat_interval_s: float = 0.2
    dead_after_s: float = 3.0  # silence: hand-offs with it end, and the controller kills and replaces it
    republish_interval_s: float = 1.0  # the controller repeats the membership so often to those who go by an older one
    engine_stuck_after_s: float = 60.0  # one engine step longer than this: the process is replaced
    start_deadline_s: float = 900.0  # from process start until it has loaded and registered
    restart_backoff_s: float = 1.0  # from the second death in a row on; doubles
    restart_forgiven_after_s: float = 30.0  # a process that served this long starts the count afresh
    max_restarts_per_minute: int = 10  # of one worker
    drain_deadline_s: float = 120.0  # what runs on a worker that shall be replaced may take so long; then it goes on
    # elsewhere


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig(ByName):
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys_file: str = ""  # of `baton keys new`; "": whoever reaches the gateway may use it
    open_metrics: bool = True  # /metrics needs no key, as the probes; it has the names of keys
    allowed_hosts: tuple[str, ...] = ()  # what it is called, for browsers, where there are no keys. None named: on
    # loopback localhost and addresses, elsewhere anything
    open_to_network: bool = False  # without keys it listens on other addresses than this machine's own only if told so
    max_inflight_requests: int = 512  # those that wait here included
    max_queued_tokens: int = 4 << 20  # of the prompts that wait here
    dispatch_ahead_requests: int = 16  # that a decode worker is given beyond those it runs; the others wait here
    request_timeout_s: float = 600.0
    max_body_bytes: int = 4 << 20
    max_sessions: int = 4096  # open conversations; their KV is bounded by decode_worker.max_sessions
    session_ttl_s: float = 3600.0  # a session that is not used so long is closed
    tool_parser: Literal["template", "hermes", "json"] = "template"  # how the model writes calls; by its chat template
    tls_cert: str = ""  # a PEM file, with the certificates between it and its root; renewed ones are noticed
    tls_key: str = ""  # its private key, a PEM file without a password; "": plain HTTP
    http: HttpConfig = field(default_factory=HttpConfig)

    @property
    def scheme(self) -> str:
        return "https" if self.tls_cert else "http"


@dataclass(frozen=True, slots=True, kw_only=True)
class IdempotencyConfig(ByName):
    """What a gateway remembers, in its memory, of requests with an `Idempotency-Key` (docs/CLIENT.md)."""

    linger_s: float = 10.0  # such a request goes on for so long when its client has hung up
    keep_s: float = 600.0  # so long its answer is told again
    max_bytes: int = 64 << 20  # of all answers; the oldest are forgotten


@dataclass(frozen=True, slots=True, kw_only=True)
class JobsConfig(ByName):
    """Files and batches (docs/JOBS.md)."""

    database: str = ""  # a SQLite file, or postgresql://...; "": $BATON_STATE_DIR/<cluster>/jobs.sqlite
    max_running_lines: int = 64  # that each gateway answers at a time
    max_lines: int = 50_000  # of one batch
    max_file_bytes: int = 200 << 20
    max_uploads: int = 64  # at a time; they wait on a disk of the gateway's until they are whole
    max_stored_bytes: int = 32 << 30  # of all files together; uploads beyond it are refused
    max_attempts: int = 10  # to answer one line, those included that ended with the process that made them
    priority: int = 50  # of lines that name none (smaller is sooner; other requests have 0)
    lease_s: float = 30.0  # after the death of a gateway its lines wait so long for another
    poll_s: float = 1.0  # between two looks for new batches, and two renewals of leases
    keep_s: float = 30 * 86_400.0  # so long after their end, batches and files are forgotten


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscaleConfig(ByName):
    """Workers change their role when the mix of requests shifts (docs/AUTOSCALING.md). Off unless costs are named."""

    cost_file: str = ""  # of `baton calibrate`, read at launch
    ttft_s: float = 2.0  # promised until the first token ...
    itl_s: float = 0.05  # ... and between two
    min_prefill: int = 1  # the most decode workers are what is left
    min_decode: int = 1
    dwell_s: float = 120.0  # the way back from a change is closed so long
    restart_s: float = 30.0  # what a worker takes from its end until its successor serves


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementConfig(ByName):
    """Where Ray puts processes, on more nodes than one (docs/CLUSTERS.md)."""

    resources: Literal["cpu", "role"] = "cpu"  # role: each takes one baton_prefill, baton_decode, baton_gateway or
    # baton_controller of the node that it is put on; whoever starts the nodes says who has which
    cpus: int = 1  # of Ray's, for each worker; with resources: role also its threads
    gpus: int = 0  # of Ray's, for each worker
    strategy: Literal["pack", "spread"] = "pack"  # spread: over the nodes that have room, before it fills any
    node_labels: tuple[str, ...] = ()  # key=value of Ray's node labels: only nodes that have them all


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggingConfig(ByName):
    """Of every process, to its standard error (docs/OBSERVABILITY.md)."""

    format: Literal["json", "text"] = "json"
    level: Literal["debug", "info", "warning", "error"] = "info"


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingConfig(ByName):
    """OpenTelemetry spans, over OTLP/HTTP. Off unless a collector is named."""

    endpoint: str = ""  # http://collector:4318; "": $OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or $OTEL_EXPORTER_OTLP_ENDPOINT
    service_name: str = ""  # "": $OTEL_SERVICE_NAME, else "baton"
    sample_ratio: float = 1.0  # of requests whose client has not decided


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig(ByName):
    """Everything `baton serve` needs to know. The same object goes to every process."""

    cluster: str = "baton"  # names the Ray namespace; one per cluster of actors
    prefill: int = 1
    decode: int = 2
    gateways: int = 1  # each serves HTTP by itself; those of one machine take ports one after the other
    bind_host: str = "127.0.0.1"  # the cluster interface: control and data sockets bind here; node: Ray's, of each node
    pin_cores: bool = True
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    kv: KvConfig = field(default_factory=KvConfig)
    prefill_worker: PrefillConfig = field(default_factory=PrefillConfig)
    decode_worker: DecodeConfig = field(default_factory=DecodeConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    liveness: LivenessConfig = field(default_factory=LivenessConfig)
    autoscale: AutoscaleConfig = field(default_factory=AutoscaleConfig)
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    idempotency: IdempotencyConfig = field(default_factory=IdempotencyConfig)
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    kv_events: KvEventsConfig = field(default_factory=KvEventsConfig)
    jobs: JobsConfig = field(default_factory=JobsConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    tracing: TracingConfig = field(default_factory=TracingConfig)

    def gateway_port(self, number: int) -> int:
        """Of the gateway of this number, from 0 on: the same on all nodes where each has a node of its own."""
        return self.gateway.port + (number if self.placement.resources == "cpu" else 0)


ConfigT = TypeVar("ConfigT")


def from_mapping(cls: type[ConfigT], values: Mapping[str, Any], path: str = "") -> ConfigT:
    """Builds a config from nested plain values (YAML, JSON, flags). Unknown keys and wrong types raise ConfigError
    with the full field name and the nearest valid one."""
    hints = typing.get_type_hints(cls)
    known: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{path}{key}"
        if key not in hints:
            near = difflib.get_close_matches(str(key), hints, n=1)
            hint = f"did you mean {path}{near[0]}?" if near else f"known here: {', '.join(sorted(hints))}"
            raise ConfigError(name, value, "there is no such setting", hint)
        known[key] = _convert(hints[key], value, name)
    return cls(**known)


def _convert(hint: Any, value: Any, name: str) -> Any:
    origin = typing.get_origin(hint)
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise ConfigError(name, value, "expected a group of settings")
        return from_mapping(typing.cast(type, hint), value, f"{name}.")
    if origin is Literal:
        choices = typing.get_args(hint)
        if value not in choices:
            raise ConfigError(name, value, f"must be one of {', '.join(map(str, choices))}")
        return value
    if origin is tuple:
        if isinstance(value, str) or not isinstance(value, list | tuple):
            raise ConfigError(name, value, "expected a list", "for example [a,b]")
        item = typing.get_args(hint)[0]
        return tuple(_convert(item, one, name) for one in value)
    if origin in (types.UnionType, typing.Union):
        options = typing.get_args(hint)
        words = [option for option in options if typing.get_origin(option) is Literal]
        inner = [option for option in options if option is not type(None) and option not in words]
        if value is None and type(None) in options:
            return None
        return _convert((words if words and isinstance(value, str) else inner)[0], value, name)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint is not bool and isinstance(value, bool)):
        raise ConfigError(name, value, f"expected {hint.__name__}")
    return value
