"""What the session machines ask of the data plane, and what it answers. Plain values; no behaviour, no I/O.

The machines (`sink.py`, `source.py`, driven by `baton.transfer.endpoint.Endpoint`) decide; the shell (`transfer/io.py`,
or the simulator on virtual time) carries these effects out with its staging memory and transports, and reports events
back through `Endpoint.on_data`. A shell may answer at once (within the same turn) or later; never twice.

Rules for a shell:
- Every effect but `CloseSink` is answered exactly once by one of the events named in its docstring, unless a fence for
  its key is asked for first: then the answer may be left out. Late answers are legal and ignored.
- After `SinkFenced(key)` nothing of `key` writes a page any more, after `SourceFenced(key)` nothing here reads one.
  Staging slots that a transport may still touch stay quarantined *inside the shell*; that never delays a fence.
- A fence always completes, and needs nobody else to: it is local.
- Failing is a value (`SinkLaneFailed`, `SourceLaneFailed`), never an exception into the endpoint.

Ids of units (`plan.py`) are little-endian int32 bytes, as on the wire (`unpack_tokens` reads them): these values
compare and hash.
"""

from __future__ import annotations

from msgspec import Struct

from baton.common.ids import HandoffKey, Stamp, WorkerId
from baton.common.messages import Chunk, Failure, HandoffBody, Probe, ProbeReady
from baton.transfer.api import SinkEvent, SourceEvent
from baton.transfer.plan import Span

PULL_LANES = frozenset({"local", "cuda_ipc"})
"""Lanes in which the receiver reads the source's pages itself. There a source needs the *peer's* proof (Commit, Cancel
or its proven death) before it may free a page. In all other lanes the source gathers and its own fence is the proof."""

# --------------------------------------------------------------------------------- out of the endpoint, both sides


class SendFrame(Struct, frozen=True):
    """Send a control frame to the process (`worker`, `dst_epoch`). May be lost: the machines re-send."""

    worker: WorkerId
    dst_epoch: int
    body: HandoffBody | Probe | ProbeReady


class EngineEvent(Struct, frozen=True):
    """Tell the engine. In order; never lost."""

    event: SinkEvent | SourceEvent


# ------------------------------------------------------------------------------------------------- sink: effects


class PrepareSink(Struct, frozen=True):
    """Choose the lane to `peer`, reserve staging, register the destination pages
    (`StagingHandler.register_decode_req`). Nothing has been offered yet. Region bytes will come under tags in
    [tag_base, tag_base + tag_count) and no others.

    Answer: `SinkPrepared` as soon as at least one slot is reserved (so perhaps later: they wait in turns, by priority),
    or `SinkNotPrepared` when it cannot be done at all."""

    key: HandoffKey
    peer: Stamp
    spans: tuple[Span, ...]  # the destination of each whole segment
    tag_base: int
    tag_count: int
    priority: int = 0  # smaller is sooner: of this hand-off's regions, and of its turn for slots


class LandRegion(Struct, frozen=True):
    """Receive (or pull) the bytes of `chunk` under `tag`, compare size and digest, scatter them into the registered
    pages. Never more of these are open per key than slots are promised: `credit` at first, then what `Landed` adds.

    Answer: `Landed`, `RegionDamaged` or `SinkLaneFailed`."""

    key: HandoffKey
    peer: Stamp
    lane: str
    tag: int
    chunk: Chunk  # geometry already checked against the hand-off's segments


class FenceSink(Struct, frozen=True):
    """The attempt is over: stop receiving and scattering, forget the registration, give the slots back (or quarantine
    them). Answer: `SinkFenced`. Comes at most once per key, also when `PrepareSink` has not been answered yet."""

    key: HandoffKey


class CloseSink(Struct, frozen=True):
    """The hand-off is committed, every `LandRegion` has been answered: forget the registration, give the slots back.
    No answer."""

    key: HandoffKey


# -------------------------------------------------------------------------------------------------- sink: events


class SinkPrepared(Struct, frozen=True):
    """Registered; `credit` >= 1 staging slots are reserved for the hand-off. Each holds `region_units` >= 1 units:
    as many for each of its segments."""

    key: HandoffKey
    lane: str
    credit: int
    region_units: tuple[int, ...]
    lane_gbps: float = 0.0  # lately, with this peer; 0.0: not known


class SinkNotPrepared(Struct, frozen=True):
    """Cannot be done at all: no lane to this peer. Nothing is registered or reserved."""

    key: HandoffKey
    failure: Failure
    peer_lost: bool  # the peer is gone: choose another


class Landed(Struct, frozen=True):
    """Region `seq` is verified and in the pages. `slots`: regions that may come beyond those promised so far. One:
    its slot is free again; none: the slot goes to a hand-off that waits; several: there is room."""

    key: HandoffKey
    seq: int
    nbytes: int
    scatter_s: float
    slots: int = 1


class RegionDamaged(Struct, frozen=True):
    """Size or digest of region `seq` was wrong; no page but the region's own was touched; its slot is free for the
    second try."""

    key: HandoffKey
    seq: int


class SinkLaneFailed(Struct, frozen=True):
    """The lane broke for this hand-off. A fence will follow."""

    key: HandoffKey
    failure: Failure
    peer_lost: bool  # the transport saw the peer go


class SinkFenced(Struct, frozen=True):
    """Nothing of `key` writes any more."""

    key: HandoffKey


# ----------------------------------------------------------------------------------------------- source: effects


class SendRegion(Struct, frozen=True):
    """Gather what `span` names of its units, compute size and digest, start sending the bytes under `tag`; on a direct
    lane without gathering, on a pull lane only compute size and digest. The Chunk frame is sent by the endpoint, when
    it hears `RegionReady`, and re-sent by it. Repeated for a damaged region, under a fresh tag.

    Answer: `RegionReady` or `SourceLaneFailed`."""

    key: HandoffKey
    peer: Stamp
    lane: str
    seq: int
    tag: int
    span: Span
    priority: int = 0


class FenceSource(Struct, frozen=True):
    """Nothing more will be sent of this hand-off (it may have ended well or badly): stop gathering and sending, give
    the sending slots back (or quarantine them). Answer: `SourceFenced`. Comes exactly once per accepted key."""

    key: HandoffKey


# ------------------------------------------------------------------------------------------------ source: events


class RegionReady(Struct, frozen=True):
    """Region `seq` is gathered and digested and its sending under `tag` has begun: on a staged lane the shell needs the
    pages no longer."""

    key: HandoffKey
    seq: int
    tag: int
    nbytes: int
    digest: int  # xxh3-64
    gather_s: float = 0.0  # of the time since SendRegion: gathering and digesting


class SourceLaneFailed(Struct, frozen=True):
    """The lane broke for this hand-off. A fence will follow."""

    key: HandoffKey
    failure: Failure


class SourceFenced(Struct, frozen=True):
    """Nothing in this process reads pages for `key` any more."""

    key: HandoffKey


SinkEffect = PrepareSink | LandRegion | FenceSink | CloseSink
SinkDataEvent = SinkPrepared | SinkNotPrepared | Landed | RegionDamaged | SinkLaneFailed | SinkFenced
SourceEffect = SendRegion | FenceSource
SourceDataEvent = RegionReady | SourceLaneFailed | SourceFenced
DataEffect = SinkEffect | SourceEffect
DataEvent = SinkDataEvent | SourceDataEvent
EndpointEffect = SendFrame | EngineEvent | DataEffect
