"""Every frame that crosses a process: one tagged union, typed msgpack, bounded, unknown fields rejected.

Owns the wire vocabulary and its limits. Never holds behaviour: what a frame does is decided by the core that gets it.
A new message is a new Struct here, one entry in `Body`, and one branch in the core that handles it.

Token ids travel as little-endian int32 bytes (`pack_tokens`): 400 ids decode in under a microsecond.
"""

from __future__ import annotations

from typing import Annotated, Literal, get_args

import msgspec
import numpy as np
from msgspec import Meta, Struct

from baton.common.errors import ErrorCode
from baton.common.ids import Epoch, HandoffKey, RequestId, Stamp, WorkerId
from baton.common.kv.layout import Component
from baton.common.prompt_logprobs import PromptLogprobs
from baton.common.spans import NOT_TRACED, Context

PROTOCOL_VERSION = 3
MAX_FRAME_BYTES = 8 << 20
MAX_TOKENS = 1 << 20
MAX_REGION_UNITS = 1 << 16
MAX_REPETITION_PENALTY = 100.0
MAX_LOGIT_BIASES = 1024
MAX_GRAMMAR_CHARS = 1 << 16
MAX_PAGE_NAMES = 1 << 16
MAX_OUTPUTS = 512
"""In one frame."""
MAX_PARTS = 8
"""Into so many groups of layers the units of a region may be cut."""

Tokens = Annotated[bytes, Meta(max_length=4 * MAX_TOKENS)]
PageNames = Annotated[bytes, Meta(max_length=8 * MAX_PAGE_NAMES)]
"""Little-endian 64-bit names of cached pages (`baton.common.kv.events`)."""
UnitIds = Annotated[bytes, Meta(max_length=4 * MAX_REGION_UNITS)]
ShortStr = Annotated[str, Meta(max_length=256)]
SessionIdStr = Annotated[str, Meta(max_length=64)]
PublicKey = Annotated[str, Meta(max_length=40)]
Text = Annotated[str, Meta(max_length=4096)]
Count = Annotated[int, Meta(ge=0, le=1 << 61)]
"""Of which a few may be added, and the sum is still one that arrays can hold."""
Finite = Annotated[float, Meta(ge=-1e12, le=1e12)]
"""A number of a peer's that is added to others: no NaN, and nothing that makes a sum infinite for good."""
Priority = Annotated[int, Meta(ge=-100, le=100)]
"""Smaller is sooner, as in vLLM. 0 unless a client says otherwise."""
TokenBias = tuple[Annotated[int, Meta(ge=0, lt=1 << 31)], Annotated[float, Meta(ge=-100, le=100)]]
"""(token, what is added to its logit)"""
RegionUnits = Annotated[int, Meta(ge=1, le=MAX_REGION_UNITS)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]


def pack_tokens(tokens: np.ndarray | list[int] | tuple[int, ...]) -> bytes:
    """Token or page ids as little-endian int32 bytes."""
    return np.ascontiguousarray(tokens, dtype="<i4").tobytes()


def unpack_tokens(packed: bytes) -> np.ndarray:
    """int32 ids, read-only, sharing the frame's memory. Raises ValueError when cut short."""
    return np.frombuffer(packed, dtype="<i4")


class _Value(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of the parts of messages."""


class _Message(_Value, frozen=True, kw_only=True, tag=True):
    """Base of the messages: the class name is the tag."""


# ---------------------------------------------------------------------------------------------- parts


class Grammar(_Value, frozen=True, kw_only=True):
    """What the whole text of an answer must be. `choice` is a JSON list of texts, `ebnf` a grammar as GBNF or Lark,
    `lark` one that refers to JSON schemas (what tool calls need)."""

    kind: Literal["json_schema", "regex", "choice", "ebnf", "lark"]
    text: Annotated[str, Meta(min_length=1, max_length=MAX_GRAMMAR_CHARS)]


class SamplingParams(_Value, frozen=True, kw_only=True):
    """How output tokens are chosen. Temperature 0 is greedy. Randomness is a function of (seed, output index) alone,
    penalties and what a grammar allows of the tokens so far, so that a request continues identically on another worker:
    there is no sampler state beside these parameters and the tokens."""

    temperature: Annotated[float, Meta(ge=0, le=100)] = 0.0
    top_k: Annotated[int, Meta(ge=0, le=(1 << 31) - 1)] = 0  # 0: off
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0  # of the likeliest token's probability; 0: off
    repetition_penalty: Annotated[float, Meta(gt=0, le=MAX_REPETITION_PENALTY)] = 1.0  # of prompt and output tokens
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0  # per time that a token was put out
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0  # once, when a token was put out
    logit_bias: Annotated[tuple[TokenBias, ...], Meta(max_length=MAX_LOGIT_BIASES)] = ()  # each token once
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0
    max_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] = 16
    stop_token_ids: Annotated[tuple[int, ...], Meta(max_length=128)] = ()
    logprobs: Annotated[int, Meta(ge=-1, le=20)] = -1  # -1: none; n: the chosen token's and the n best
    prompt_logprobs: Annotated[int, Meta(ge=-1, le=20)] = -1  # the same, of the prompt's own tokens
    grammar: Grammar | None = None

    @property
    def penalizes(self) -> bool:
        """The logits are changed, token by token."""
        penalties = (self.repetition_penalty, self.frequency_penalty, self.presence_penalty)
        return bool(self.logit_bias) or penalties != (1.0, 0.0, 0.0)

    @property
    def scores_prompt(self) -> bool:
        """The prompt's own tokens get log probabilities: so all of it is computed, whatever is cached. Together with
        output 0, and never again: who goes on from outputs has them."""
        return self.prompt_logprobs >= 0

    @property
    def reshapes(self) -> bool:
        """Which token is chosen depends on those before it, beside the model."""
        return self.grammar is not None or self.penalizes


class TokenLogprob(_Value, frozen=True, kw_only=True):
    """Log probability of one output token and of the best alternatives, under the unmodified distribution."""

    logprob: float
    top: Annotated[tuple[tuple[int, float], ...], Meta(max_length=20)] = ()


class Timeline(_Value, frozen=True, kw_only=True):
    """Where one request's time and bytes went, in seconds, as measured by the decode worker (and, of the first, by its
    gateway). Sums add up over attempts.
    `prompt_tokens == local_tokens + cached_tokens + restored_tokens + transferred_tokens`."""

    gateway_s: Finite = 0.0  # arrival at the gateway until it had its turn there
    queue_s: Finite = 0.0  # arrival at decode until its pages were promised
    reserve_wait_s: Finite = 0.0  # of which: waited because pages or staging were short
    restore_s: Finite = 0.0  # waited for the tiers below the pool
    handoff_s: Finite = 0.0  # a prefill worker was asked until its KV was here: its queue, its computing, the transfer
    prefill_s: Finite = 0.0  # computing the prompt, on whichever worker
    transfer_s: Finite = 0.0  # first chunk announced until the last one landed
    scatter_s: Finite = 0.0  # of which: writing regions into pages
    decode_queue_s: Finite = 0.0  # all KV had landed until its first step began; the end of it is a part of decode_s
    decode_s: Finite = 0.0  # runnable until finished
    transfer_bytes: Count = 0
    lane: ShortStr = ""  # "" when nothing was transferred
    prefill_worker: ShortStr = ""
    decode_worker: ShortStr = ""
    local_tokens: Count = 0  # prompt tokens computed on the decode worker itself
    cached_tokens: Count = 0  # prompt tokens found in the decode worker's prefix cache
    restored_tokens: Count = 0  # prompt tokens found in a tier below the pool
    transferred_tokens: Count = 0  # prompt tokens whose KV was handed over
    prefill_cached_tokens: Count = 0  # of those: found in the prefill worker's prefix cache
    attempts: Count = 0  # hand-offs tried
    retractions: Count = 0


class Failure(_Value, frozen=True, kw_only=True):
    """Why something ended badly; `code` is for programs, `reason` for people."""

    code: ErrorCode
    reason: Text = ""


class Demand(_Value, frozen=True, kw_only=True):
    """What a gateway has been asked for since it began, and what came of it: sums, of which autoscaling takes rates."""

    requests: Count = 0
    tokens: Count = 0  # of their prompts
    squares: Count = 0  # of the prompts' tokens
    ended: Count = 0  # requests that were answered
    outputs: Count = 0  # tokens of these answers
    said: Count = 0  # tokens of all answers, unfinished ones too
    prompts: Count = 0  # tokens of their prompts
    computed: Count = 0  # of which: computed by prefill workers


class Load(_Value, frozen=True, kw_only=True):
    """What a worker says of itself in each heartbeat. `step_age_s` is how long the current engine step has run:
    health means *can finish work*, not *answers*. `step_overhead_s` is what all `steps` together have spent outside of
    the model: planning, and telling what came of it."""

    queued: Count = 0
    running: Count = 0
    free_pages: Count = 0  # free, or cached and evictable
    total_pages: Count = 0
    queued_tokens: Count = 0
    steps: Count = 0
    step_age_s: Finite = 0.0
    step_overhead_s: Finite = 0.0
    tokens_per_s: Finite = 0.0  # at which prompts are computed; 0: nothing was measured
    kv_seq: Count = 0  # of the newest KvEvents; 0: there were none
    draining: bool = False
    demand: Demand | None = None  # of gateways


class LaneAddress(_Value, frozen=True, kw_only=True):
    """How a worker is reached on one data lane; only the lane itself reads `address`."""

    lane: ShortStr
    address: Annotated[dict[str, str | int], Meta(max_length=16)]


class Member(_Value, frozen=True, kw_only=True, omit_defaults=True):
    """One process of the cluster, as the controller publishes it. It travels in Hello, so it is frozen like that.
    `group` is the controller's word: those of one may hand over to each other (baton.common.compat)."""

    stamp: Stamp
    role: ShortStr  # "prefill" | "decode" | "gateway" | "controller"
    address: ShortStr  # control socket, "tcp://10.0.0.3:4711"
    key: PublicKey = ""  # of its own pair, Z85; "" where nothing is encrypted
    lanes: Annotated[tuple[LaneAddress, ...], Meta(max_length=8)] = ()
    fingerprint: Annotated[dict[str, str], Meta(max_length=64)] = {}
    load: Load = Load()
    group: ShortStr = ""


# ----------------------------------------------------------------- registration, membership, liveness
# Hello and Reject are frozen for ever: whatever else changes, two versions can still tell each other so.


class Hello(_Message, frozen=True, kw_only=True):
    """process -> controller, repeated until a Membership lists the sender."""

    protocol_version: int
    member: Member


class Reject(_Message, frozen=True, kw_only=True):
    """controller -> process: not admitted. `differences` maps field -> "theirs != ours"."""

    protocol_version: int
    reason: Text
    differences: Annotated[dict[str, str], Meta(max_length=64)] = {}


class Heartbeat(_Message, frozen=True, kw_only=True, omit_defaults=True):
    """Each `heartbeat_interval_s`: a worker to the controller and every gateway, a gateway to the controller and every
    decode worker, and whoever has a hand-off to its peer, who is asked to say that it lives, too."""

    load: Load = Load()
    asks: bool = False
    view: Count = 0  # the version of the membership that the sender goes by; 0: none yet
    leaving: bool = False  # it was told to stop (SIGTERM): it finishes what it has, and wants a successor


class Membership(_Message, frozen=True, kw_only=True):
    """controller -> everyone: the whole view. A stamp that is missing from a newer version is *proven dead*:
    its process has been killed, it reads and writes nothing any more."""

    version: Count
    members: Annotated[tuple[Member, ...], Meta(max_length=4096)]


# ------------------------------------------------------------------------------------ gateway <-> decode


class Submit(_Message, frozen=True, kw_only=True):
    """gateway -> decode, re-sent until Submitted. `outputs` are tokens that an earlier worker already produced:
    the answer continues after them. `placement` counts the decode workers tried for this request."""

    request_id: RequestId
    placement: Count
    prompt: Tokens
    outputs: Tokens = b""
    sampling: SamplingParams
    ttl_s: Seconds  # deadline, as time left: clocks are not shared
    priority: Priority = 0
    prefill_worker: WorkerId | None = None  # the router's choice; decode may pick another when it is gone
    session_id: SessionIdStr = ""  # the conversation this is a turn of; "": none
    session_turn: Count = 0  # turns of it that were answered before
    thinking_token_id: Annotated[int, Meta(ge=-1)] = -1  # an answer with it is not cached; -1: every answer is
    trace: Context = NOT_TRACED


class Submitted(_Message, frozen=True, kw_only=True):
    """decode -> gateway: the request is mine now. Duplicates of Submit are answered again."""

    request_id: RequestId
    placement: Count


class Output(_Message, frozen=True, kw_only=True):
    """decode -> gateway: output tokens from `first_index` on. The last one has `finish_reason` or `failure`, and is
    re-sent until FinishAck. A gap (first_index above what has been received) is asked for again with Resume. Every one
    that begins with token 0 has the prompt's log probabilities, where they are wanted: so who has a token has them."""

    request_id: RequestId
    placement: Count
    first_index: Count
    tokens: Tokens = b""
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: PromptLogprobs | None = None
    finish_reason: ShortStr = ""  # "" | "stop" | "length"
    failure: Failure | None = None
    timeline: Timeline | None = None  # with the last one


class Outputs(_Message, frozen=True, kw_only=True):
    """decode -> gateway: several of them in one frame, in their order. No core sees it: the receiving thread takes it
    apart."""

    parts: Annotated[tuple[Output, ...], Meta(max_length=MAX_OUTPUTS)]


class Resume(_Message, frozen=True, kw_only=True):
    """gateway -> decode: send outputs again from `next_index`."""

    request_id: RequestId
    placement: Count
    next_index: Count


class FinishAck(_Message, frozen=True, kw_only=True):
    """gateway -> decode: the last Output arrived; forget the request."""

    request_id: RequestId
    placement: Count


class CancelRequest(_Message, frozen=True, kw_only=True):
    """gateway -> decode; legal before Submit (tombstone). Answered by a last Output with failure `cancelled`.
    `answered`: the gateway has the whole answer (it found a stop string), so a session keeps the turn."""

    request_id: RequestId
    placement: Count
    answered: bool = False


class CloseSession(_Message, frozen=True, kw_only=True):
    """gateway -> decode: no turn will follow. May be lost: the session's time ends it, too."""

    session_id: SessionIdStr


# ----------------------------------------------------------------------------------- decode <-> prefill


class Ticket(_Value, frozen=True, kw_only=True):
    """The right to begin one hand-off (baton.transfer.session.tickets). Number 0: there is none."""

    number: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0
    mac: Annotated[bytes, Meta(max_length=32)] = b""


class Offer(_Message, frozen=True, kw_only=True):
    """decode -> prefill: I have pages for this request's KV from token `start` on; please fill them.
    Re-sent until Accept or Refuse. Sent only after row, pages and staging credit are held."""

    key: HandoffKey
    request_id: RequestId
    tokens: Tokens  # whole sequence whose KV is wanted; [0, start) is known to the receiver
    start: Count  # page-aligned
    sample: bool  # also sample the token after the last one (output 0)
    sampling: SamplingParams
    ttl_s: Seconds
    lane: ShortStr
    credit: Count  # regions with seq < credit may be sent
    region_units: Annotated[tuple[RegionUnits, ...], Meta(max_length=len(Component))]  # most in a region, by segment
    tag_base: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]  # region seq travels under tag_base + seq; never reused
    priority: Priority = 0  # of its regions among those of others
    lane_gbps: Annotated[float, Meta(ge=0, le=1e9)] = 0.0  # what the receiver has measured on the lane; 0: nothing yet
    trace: Context = NOT_TRACED
    ticket: Ticket = Ticket()


class Accept(_Message, frozen=True, kw_only=True):
    """prefill -> decode: queued; regions will follow."""

    key: HandoffKey


class Refuse(_Message, frozen=True, kw_only=True):
    """prefill -> decode: will not do it; nothing of this attempt exists here. Not when to come again: who is refused
    goes elsewhere at once."""

    key: HandoffKey
    failure: Failure


class Chunk(_Message, frozen=True, kw_only=True, omit_defaults=True):
    """prefill -> decode: region `seq` holds units [first_unit, first_unit + units) of the hand-off's segment of
    `component` (transfer/plan.py), or, with `parts` > 1, one part of their layers: then the segment is sent by layers
    from unit `tail` to its end. Its bytes travel on the data lane under `tag`, or wait in `source_pages` to be pulled
    (lane "local"). Re-sent until Ack."""

    key: HandoffKey
    seq: Count
    tag: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]  # tag_base + seq, or the fresh one that a Nack named
    component: Component = Component.FULL
    first_unit: Count
    units: RegionUnits
    part: Annotated[int, Meta(ge=0, lt=MAX_PARTS)] = 0
    parts: Annotated[int, Meta(ge=1, le=MAX_PARTS)] = 1
    tail: Count = 0
    nbytes: Count
    digest: Annotated[int, Meta(ge=0)]  # of the region's bytes (baton.transfer.digest)
    source_pages: UnitIds = b""


class Ack(_Message, frozen=True, kw_only=True):
    """decode -> prefill: region `seq` is in my pages and verified; you may send regions with seq < credit."""

    key: HandoffKey
    seq: Count
    credit: Count


class Nack(_Message, frozen=True, kw_only=True):
    """decode -> prefill: region `seq` arrived damaged; send it again, under the fresh `tag`."""

    key: HandoffKey
    seq: Count
    tag: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class Done(_Message, frozen=True, kw_only=True):
    """prefill -> decode: all segments of [start, total_tokens) are computed, and go out in `regions` regions. Re-sent,
    once these are announced, until Commit or Cancel. Both sides compare the counts."""

    key: HandoffKey
    regions: Count
    total_tokens: Count
    first_token: Annotated[int, Meta(ge=-1, le=(1 << 31) - 1)] = -1  # -1: none was asked for
    logprob: TokenLogprob | None = None
    prompt_logprobs: PromptLogprobs | None = None  # with the first token, where they are wanted
    prefill_s: Finite = 0.0
    cached_tokens: Count = 0


class Commit(_Message, frozen=True, kw_only=True):
    """decode -> prefill: everything landed and agreed; the KV is mine, release yours."""

    key: HandoffKey


class Cancel(_Message, frozen=True, kw_only=True):
    """decode -> prefill: this attempt is over, and I have provably stopped reading and receiving it. Legal before the
    Offer has arrived (tombstone). Re-sent until Cancelled."""

    key: HandoffKey
    failure: Failure


class Cancelled(_Message, frozen=True, kw_only=True):
    """prefill -> decode: nothing of this attempt is left here."""

    key: HandoffKey


class Failed(_Message, frozen=True, kw_only=True):
    """prefill -> decode: I give up on this attempt. Re-sent until Cancel, which proves that nobody reads my pages."""

    key: HandoffKey
    failure: Failure


class Probe(_Message, frozen=True, kw_only=True):
    """receiver -> source: make `nbytes` bytes of no meaning ready on `lane` under `tag`: I measure it. May be lost, or
    ignored by a source that has other things to do."""

    lane: ShortStr
    tag: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
    nbytes: Annotated[int, Meta(ge=1, le=MAX_FRAME_BYTES)]


class KvEvents(_Message, frozen=True, kw_only=True):
    """worker -> gateways: what its prefix tree has come to hold, and holds no more. Numbered from 1 without gaps; sent
    once. A page that is named twice was there before, or is gone before, and still is."""

    seq: Annotated[int, Meta(ge=1)]
    stored: PageNames = b""
    removed: PageNames = b""


class KvEventsWanted(_Message, frozen=True, kw_only=True):
    """gateway -> worker: I have missed what you said from `first_seq` on. Answered by that, or by a KvSnapshot."""

    first_seq: Annotated[int, Meta(ge=1)]


class KvSnapshot(_Message, frozen=True, kw_only=True):
    """worker -> gateway: all that its prefix tree holds after KvEvents `seq`, in `parts` messages."""

    seq: Annotated[int, Meta(ge=1)]
    part: Count
    parts: Annotated[int, Meta(ge=1, le=1 << 16)]
    names: PageNames = b""


class ProbeReady(_Message, frozen=True, kw_only=True):
    """source -> receiver: they are."""

    tag: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


Body = (
    Hello
    | Reject
    | Heartbeat
    | Membership
    | Submit
    | Submitted
    | Output
    | Outputs
    | Resume
    | FinishAck
    | CancelRequest
    | CloseSession
    | Offer
    | Accept
    | Refuse
    | Chunk
    | Ack
    | Nack
    | Done
    | Commit
    | Cancel
    | Cancelled
    | Failed
    | Probe
    | ProbeReady
    | KvEvents
    | KvEventsWanted
    | KvSnapshot
)

HandoffBody = Offer | Accept | Refuse | Chunk | Ack | Nack | Done | Commit | Cancel | Cancelled | Failed
"""Frames between source and sink of a hand-off; all carry `key`."""


class Frame(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What is on the wire: who says it, to which process, and what. A frame whose `dst_epoch` is neither 0 nor the
    receiver's own was meant for a process that is gone; it is counted and dropped."""

    src: Stamp
    dst_epoch: Epoch
    body: Body


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Frame)
_PACKED: dict[type[Body], tuple[str, ...]] = {
    kind: tuple(name for name in ("prompt", "outputs", "tokens", "source_pages") if name in kind.__struct_fields__)
    for kind in get_args(Body)
}
"""The fields of each kind that hold int32 ids."""
_NAMED: dict[type[Body], tuple[str, ...]] = {KvEvents: ("stored", "removed"), KvSnapshot: ("names",)}
"""And those that hold names of pages."""


class MalformedFrame(Exception):
    """Bytes that are not a frame. The receiver counts it and lives on."""


def encode_frame(frame: Frame) -> bytes:
    """msgpack bytes of one frame."""
    return _encoder.encode(frame)


def decode_frame(data: bytes | memoryview) -> Frame:
    """Raises MalformedFrame on anything that is not exactly one well-formed, bounded frame."""
    if len(data) > MAX_FRAME_BYTES:
        raise MalformedFrame(f"{len(data)} bytes, over the limit of {MAX_FRAME_BYTES}")
    try:
        frame = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedFrame(str(error)) from error
    for body in frame.body.parts if isinstance(frame.body, Outputs) else (frame.body,):
        for name in _PACKED[type(body)]:
            packed: bytes = getattr(body, name)
            if len(packed) % 4:
                raise MalformedFrame(f"{name}: {len(packed)} bytes are not whole int32 ids")
        for name in _NAMED.get(type(body), ()):
            packed = getattr(body, name)
            if len(packed) % 8:
                raise MalformedFrame(f"{name}: {len(packed)} bytes are not whole 64-bit names")
    return frame
