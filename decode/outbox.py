"""What a decode worker says to gateways: tokens as they come, the one last message until it is acknowledged.

Owns: the messages waiting to leave, the last messages that are not acknowledged yet, and the memory of placements that
are over (tombstones). Never: decides an outcome, or knows about KV. Bounded: `max_finals` unacknowledged last messages
and `max_tombstones` memories, oldest forgotten first; a gateway that asks for something forgotten is told so; and
`MAX_TOKENS_PER_OUTPUT` tokens in one message: who misses more asks again after each, so that a loss is repaired at the
pace at which the receiver takes it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from msgspec import structs

from baton.common.config import TransferConfig
from baton.common.deadlines import Deadlines
from baton.common.engine.core_api import SendTo
from baton.common.errors import ErrorCode
from baton.common.ids import Stamp
from baton.common.messages import Body, Failure, Output, Submitted, pack_tokens
from baton.common.prompt_logprobs import join_chunks
from baton.decode.request import DecodeRequest, RequestKey

FINAL_TTL_S = 60.0
"""A gateway that has not acknowledged by then is deaf; it asks again if it ever recovers, and is told "not here"."""

MAX_TOKENS_PER_OUTPUT = 4096
"""With 20 alternatives each, their log probabilities take a fifth of what a frame may have; a prompt's half of it."""


class Outbox:
    """`forget` is called with a request whose last message is acknowledged or out of time."""

    def __init__(self, transfer: TransferConfig, max_finals: int, forget: Callable[[DecodeRequest], None]) -> None:
        self._resend_s = transfer.resend_after_s
        self._tombstone_ttl_s = transfer.tombstone_ttl_s
        self._max_tombstones = transfer.max_tombstones
        self._max_finals = max_finals
        self._forget = forget
        self._finals: OrderedDict[RequestKey, DecodeRequest] = OrderedDict()
        self._resends: Deadlines[RequestKey] = Deadlines()
        self._tombstones: OrderedDict[tuple[Stamp, RequestKey], float] = OrderedDict()
        self._out: list[SendTo] = []

    # ---------------------------------------------------------------------------------------- messages

    def send(self, gateway: Stamp, body: Body) -> None:
        self._out.append(SendTo(gateway.worker, gateway.epoch, body))

    def submitted(self, request: DecodeRequest) -> None:
        request_id, placement = request.key
        self.send(request.gateway, Submitted(request_id=request_id, placement=placement))

    def token(self, request: DecodeRequest, packed: bytes) -> None:
        """The newest output token of a request that goes on."""
        index = len(request.outputs) - 1
        self.send(
            request.gateway,
            Output(
                request_id=request.key[0],
                placement=request.key[1],
                first_index=index,
                tokens=packed,
                logprobs=tuple(request.logprobs[index - request.inherited :]) if request.logprobs else (),
                prompt_logprobs=join_chunks(request.scores) if index == 0 else None,
            ),
        )

    def resume(self, request: DecodeRequest, next_index: int) -> None:
        """Outputs from `next_index` on, again, as many as one message takes. What comes behind them (the next token,
        the end) shows the gateway that there are more."""
        first = min(next_index, len(request.outputs))
        if request.final is not None:
            self._send_final(request, first)
        else:
            self.send(request.gateway, _piece(request, first))

    def refuse(self, gateway: Stamp, key: RequestKey, failure: Failure) -> None:
        """A last message that is not kept: who missed it asks again and gets it again."""
        self.send(gateway, Output(request_id=key[0], placement=key[1], first_index=0, failure=failure))

    def take(self) -> list[SendTo]:
        out, self._out = self._out, []
        return out

    @property
    def waiting(self) -> bool:
        return bool(self._out)

    # ------------------------------------------------------------------------------------ last messages

    def finish(self, request: DecodeRequest, final: Output, first_index: int, now: float) -> None:
        """Sends the last message with the outputs from `first_index` on; again and again until acknowledged."""
        request.final = final
        request.final_expires_s = now + FINAL_TTL_S
        self._finals[request.key] = request
        self._send_final(request, first_index)
        self._resends.set(request.key, now + self._resend_s)
        if len(self._finals) > self._max_finals:
            self._drop(next(iter(self._finals.values())), now)

    def acknowledge(self, key: RequestKey, now: float) -> None:
        if (request := self._finals.get(key)) is not None:
            self._drop(request, now)

    def on_timer(self, now: float) -> None:
        for key in self._resends.pop_due(now):
            request = self._finals[key]
            if now >= request.final_expires_s:
                self._drop(request, now)
            else:
                self._send_final(request, len(request.outputs))  # who misses tokens asks for them
                self._resends.set(key, now + self._resend_s)

    def next_deadline(self) -> float | None:
        return self._resends.next_s()

    def _send_final(self, request: DecodeRequest, first: int) -> None:
        final = request.final
        assert final is not None
        if len(request.outputs) - first > MAX_TOKENS_PER_OUTPUT:
            self.send(request.gateway, _piece(request, first))
            first = len(request.outputs)
        self.send(
            request.gateway,
            structs.replace(
                _piece(request, first),
                finish_reason=final.finish_reason,
                failure=final.failure,
                timeline=final.timeline,
            ),
        )

    def _drop(self, request: DecodeRequest, now: float) -> None:
        del self._finals[request.key]
        self._resends.drop(request.key)
        self.bury(request.gateway, request.key, now)
        self._forget(request)

    # -------------------------------------------------------------------------------------- tombstones

    def bury(self, gateway: Stamp, key: RequestKey, now: float) -> None:
        """Remembers that this placement of a gateway's is over, so that a late Submit does not start it again."""
        self._tombstones[gateway, key] = now + self._tombstone_ttl_s
        self._tombstones.move_to_end((gateway, key))
        while self._tombstones:
            oldest, expires_s = next(iter(self._tombstones.items()))
            if expires_s > now and len(self._tombstones) <= self._max_tombstones:
                break
            del self._tombstones[oldest]

    def is_buried(self, gateway: Stamp, key: RequestKey, now: float) -> bool:
        return self._tombstones.get((gateway, key), 0.0) > now

    @property
    def tombstones(self) -> int:
        return len(self._tombstones)


NOT_HERE = Failure(code=ErrorCode.CANCELLED, reason="this placement is over or unknown on this worker")


def _piece(request: DecodeRequest, first: int) -> Output:
    """Outputs from `first` on that fit into one message."""
    end = min(len(request.outputs), first + MAX_TOKENS_PER_OUTPUT)
    first_logprob, end_logprob = (max(0, index - request.inherited) for index in (first, end))
    return Output(
        request_id=request.key[0],
        placement=request.key[1],
        first_index=first,
        tokens=pack_tokens(request.outputs[first:end]),
        logprobs=tuple(request.logprobs[first_logprob:end_logprob]),
        prompt_logprobs=join_chunks(request.scores) if first == 0 and request.outputs else None,
    )
