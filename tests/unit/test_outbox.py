"""Outbox and GatewayCore face to face: an answer that is too long for one message arrives whole."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest

from baton.common.config import GatewayConfig, LivenessConfig, TransferConfig
from baton.common.engine.core_api import FromPeer, MembershipView, SendTo
from baton.common.ids import Epoch, RequestId, Stamp, WorkerId
from baton.common.messages import (
    MAX_FRAME_BYTES,
    FinishAck,
    Frame,
    Member,
    Output,
    Resume,
    SamplingParams,
    Submitted,
    Timeline,
    TokenLogprob,
    encode_frame,
)
from baton.decode.outbox import MAX_TOKENS_PER_OUTPUT, Outbox
from baton.decode.request import DecodeRequest, Done
from baton.deploy.gateway_core import GatewayCore
from baton.deploy.gateway_states import RequestEnded, TokensArrived

GATEWAY = Stamp(WorkerId("gateway-0"), 1, Epoch(11))
DECODE = Stamp(WorkerId("decode-0"), 1, Epoch(22))
R = RequestId("r")
TOP = tuple((2**31 - 1 - rank, -0.123456789 - rank) for rank in range(20))
SAMPLING = SamplingParams(max_tokens=50_000, logprobs=20)


def request_with(tokens: int, inherited: int = 0) -> DecodeRequest:
    return DecodeRequest(
        number=1,
        key=(R, 0),
        gateway=GATEWAY,
        prompt=np.arange(5, dtype=np.int32),
        outputs=list(range(tokens)),
        sampling=SAMPLING,
        deadline_s=100.0,
        preferred=None,
        state=Done(),
        stop_ids=frozenset(),
        limit=50_000,
        inherited=inherited,
        logprobs=[TokenLogprob(logprob=-float(index), top=TOP) for index in range(inherited, tokens)],
    )


class Pair:
    """What one says, the other hears, in order. `told` is what the client gets."""

    def __init__(self, tokens: int) -> None:
        self.request = request_with(tokens)
        self.outbox = Outbox(TransferConfig(), 8, lambda request: None)
        self.gateway = GatewayCore(GatewayConfig(), TransferConfig(), LivenessConfig(), 100_000)
        members = (Member(stamp=DECODE, role="decode", address=""),)
        self.gateway.handle(MembershipView(1, members, frozenset()), 0.0)
        self.gateway.submit(R, self.request.prompt, SAMPLING, 100.0, 0.0)
        self.gateway.handle(FromPeer(DECODE, Submitted(request_id=R, placement=0)), 0.0)
        self.told: list[TokensArrived | RequestEnded] = []
        self.messages = 0

    def talk(self) -> None:
        waiting = deque(self.outbox.take())
        while waiting:
            body = waiting.popleft().body
            assert len(encode_frame(Frame(DECODE, GATEWAY.epoch, body))) <= MAX_FRAME_BYTES // 4
            self.messages += 1
            for effect in self.gateway.handle(FromPeer(DECODE, body), 0.0):
                match effect:
                    case SendTo(body=Resume(next_index=index)):
                        self.outbox.resume(self.request, index)
                    case SendTo(body=FinishAck()):
                        self.outbox.acknowledge((R, 0), 0.0)
                    case TokensArrived() | RequestEnded():
                        self.told.append(effect)
                    case _:
                        raise AssertionError(effect)
            waiting.extend(self.outbox.take())

    @property
    def tokens(self) -> list[int]:
        return [token for one in self.told if isinstance(one, TokensArrived) for token in one.tokens]


@pytest.mark.parametrize("tokens", [0, 1, MAX_TOKENS_PER_OUTPUT, MAX_TOKENS_PER_OUTPUT + 1, 50_000])
def test_a_finished_answer_that_was_lost_arrives_in_pieces(tokens: int) -> None:
    pair = Pair(tokens)
    timeline = Timeline(decode_s=1.0)
    final = Output(request_id=R, placement=0, first_index=0, finish_reason="length", timeline=timeline)
    pair.outbox.finish(pair.request, final, max(0, tokens - 1), 0.0)
    pair.talk()
    assert pair.tokens == pair.request.outputs
    logprobs = [one for part in pair.told if isinstance(part, TokensArrived) for one in part.logprobs]
    assert logprobs == pair.request.logprobs
    assert [(one.finish_reason, one.timeline) for one in pair.told if isinstance(one, RequestEnded)] == [
        ("length", timeline)
    ]
    assert pair.messages <= 1 + 2 * (1 + tokens // MAX_TOKENS_PER_OUTPUT), "each loss is asked for once"
    assert pair.outbox.next_deadline() is None


def test_a_running_answer_catches_up_piece_by_piece() -> None:
    pair = Pair(2 * MAX_TOKENS_PER_OUTPUT + 10)
    for _ in range(3):
        pair.request.outputs.append(len(pair.request.outputs))
        pair.request.logprobs.append(TokenLogprob(logprob=-1.0, top=TOP))
        pair.outbox.token(pair.request, np.array(pair.request.outputs[-1:], dtype="<i4").tobytes())
        pair.talk()
    assert pair.tokens == pair.request.outputs


def test_pieces_of_a_migrated_answer_have_the_log_probabilities_of_their_tokens() -> None:
    request = request_with(MAX_TOKENS_PER_OUTPUT + 30, inherited=20)
    outbox = Outbox(TransferConfig(), 8, lambda request: None)
    outbox.resume(request, 25)
    (said,) = outbox.take()
    assert isinstance(said.body, Output)
    assert said.body.logprobs == tuple(request.logprobs[5 : 5 + MAX_TOKENS_PER_OUTPUT])
    assert len(said.body.tokens) == 4 * MAX_TOKENS_PER_OUTPUT
