"""What an engine asks of the transfer plane, and what it hears back. Plain values; no behaviour, no I/O.

Ownership across this border (docs/KV-OWNERSHIP.md: "incoming", "outgoing"):
- After `OpenSink` the destination pages belong to the hand-off. They come back with exactly one `SinkCommitted` (all
  bytes landed and verified) or `SinkFailed` (no one writes them any more). Never with a timer alone.
- After the first `ShipRegion` the source pages belong to the hand-off. They come back with exactly one
  `SourceReleased` (the receiver has it) or `SourceAborted` (no one reads them any more).

What one hand-off moves is `plan.segments_of(layout, start, total)`: one segment per component of the model. A state's
"page" is its slot. Both engines and both ends of the transfer plane compute the same segments.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from baton.common.ids import HandoffKey, RequestId, Stamp, WorkerId
from baton.common.kv.layout import Component
from baton.common.messages import Failure, SamplingParams, TokenLogprob
from baton.common.prompt_logprobs import PromptLogprobs
from baton.common.spans import NOT_TRACED

I32 = npt.NDArray[np.int32]


class PrefillResult(Struct, frozen=True):
    """What prefill produced besides KV; travels with the hand-off. `first_token` is -1 when none was asked for. The
    prompt's log probabilities go with it, where they are wanted."""

    first_token: int
    logprob: TokenLogprob | None
    prefill_s: float
    cached_tokens: int
    prompt_logprobs: PromptLogprobs | None = None


def return_key(key: HandoffKey) -> HandoffKey:
    """The hand-off of the same two workers with their roles turned round: by it the source of `key` is given what the
    sink has of the tokens before the offer's start. And the hand-off that a return belongs to. Attempts of hand-offs
    count from 0 up, of returns from -1 down: so a key is never both."""
    return HandoffKey(key.handoff, ~key.attempt)


# --------------------------------------------------------------------------- sink (decode) side: commands


class OpenSink(Struct, frozen=True):
    """Ask `peer` for the KV of tokens [start, len(tokens)). `pages` are the destination pages of exactly the segments
    of that range (start is page-aligned), by component. At most one open sink per hand-off id at a time."""

    key: HandoffKey
    peer: WorkerId
    request_id: RequestId
    tokens: I32
    start: int
    pages: Mapping[Component, I32]
    sample: bool
    sampling: SamplingParams
    deadline_s: float  # on the local clock
    priority: int = 0  # smaller is sooner
    trace: str = NOT_TRACED  # `baton.common.spans`


class AbortSink(Struct, frozen=True):
    """Give up. Answered by SinkFailed once no write can land any more (or by SinkCommitted, if that came first)."""

    key: HandoffKey
    failure: Failure


# ---------------------------------------------------------------------------- sink (decode) side: events


class FirstTokenReady(Struct, frozen=True):
    """Prefill has sampled the first token; some bytes are still on their way. At most once per hand-off, before its
    end, and for good: a hand-off that fails afterwards takes nothing back."""

    key: HandoffKey
    first_token: int
    logprob: TokenLogprob | None
    prompt_logprobs: PromptLogprobs | None = None


class SinkCommitted(Struct, frozen=True):
    """All segments of [start, total) are in the pages. They are the request's now."""

    key: HandoffKey
    peer: WorkerId
    result: PrefillResult
    nbytes: int
    lane: str
    transfer_s: float
    scatter_s: float
    landed_s: float  # when, on the local clock


class SinkFailed(Struct, frozen=True):
    """Over without commit, and fenced: nobody writes the pages. [start, landed_until) did land and is valid. Of a model
    with sliding or recurrent layers that is nothing: what they keep is only good for the whole of the tokens."""

    key: HandoffKey
    peer: WorkerId
    failure: Failure
    landed_until: int
    nbytes: int
    lane: str  # what landed came by; "" when none was chosen yet
    peer_lost: bool  # the peer is gone or silent: choose another


# ------------------------------------------------------------------------ source (prefill) side: events


class OfferReceived(Struct, frozen=True):
    """A decode worker wants KV. The offer has been accepted towards it; refuse later with AbortSource."""

    key: HandoffKey
    peer: Stamp
    request_id: RequestId
    tokens: I32
    start: int
    sample: bool
    sampling: SamplingParams
    deadline_s: float  # on the local clock
    priority: int = 0  # smaller is sooner
    lane_gbps: float = 0.0  # what the receiver has measured on the lane; 0.0: nothing yet
    trace: str = NOT_TRACED


class SourceReleased(Struct, frozen=True):
    """The receiver committed. The pages are prefill's own again."""

    key: HandoffKey


class SourceAborted(Struct, frozen=True):
    """Over without commit, and proven: nobody reads the pages."""

    key: HandoffKey
    failure: Failure


class SourceStopping(Struct, frozen=True):
    """The attempt is over for the peer but a reader could not yet be proven finished: stop computing, keep the pages
    (quarantined) until SourceAborted."""

    key: HandoffKey
    failure: Failure


# ---------------------------------------------------------------------- source (prefill) side: commands


class ShipRegion(Struct, frozen=True):
    """Tokens [first_token, first_token + tokens) are computed, and what `component` keeps of them lies in `pages`.
    Ranges follow one another without gap through the segments of the hand-off, in the order of `Component`; every
    boundary but a segment's last is page-aligned. A state is shipped once: its segment's tokens, and its slot.

    What reaches to a segment's end may be shipped by layers: the same tokens `parts` times, with `part` 0, 1, ..., each
    when layers [0, (part + 1) * layers // parts) of these tokens are computed. From the first part on the pages stay
    the same until the hand-off has ended."""

    key: HandoffKey
    first_token: int
    tokens: int
    pages: I32
    component: Component = Component.FULL
    part: int = 0
    parts: int = 1


class FinishSource(Struct, frozen=True):
    """Every segment was shipped to its end; `result` goes with the Done message. `queued_s`: since the offer came,
    until pages were promised."""

    key: HandoffKey
    result: PrefillResult
    queued_s: float = 0.0


class AbortSource(Struct, frozen=True):
    """Prefill gives up on this attempt. Answered by SourceAborted once no reader is left."""

    key: HandoffKey
    failure: Failure


SinkCommand = OpenSink | AbortSink
SourceCommand = ShipRegion | FinishSource | AbortSource
SinkEvent = FirstTokenReady | SinkCommitted | SinkFailed
SourceEvent = OfferReceived | SourceReleased | SourceAborted | SourceStopping
