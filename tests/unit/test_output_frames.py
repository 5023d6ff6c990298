"""Outputs share frames: nothing is lost, said twice or out of its order, and no frame grows over its limit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.common.engine.core_api import SendTo
from baton.common.ids import Epoch, RequestId, Stamp, WorkerId
from baton.common.messages import (
    MAX_FRAME_BYTES,
    MAX_OUTPUTS,
    Frame,
    MalformedFrame,
    Output,
    Outputs,
    Submitted,
    TokenLogprob,
    decode_frame,
    encode_frame,
    pack_tokens,
)
from baton.transfer.output_frames import SMALL_OUTPUT_BYTES, gathered

SENDER = Stamp(WorkerId("decode-0"), 1, Epoch(7))
MOST_LOGPROBS = tuple((1 << 30, -1.0) for _ in range(20))


def output(number: int, tokens: int = 1) -> Output:
    logprobs = (TokenLogprob(logprob=-0.5, top=MOST_LOGPROBS),) * min(tokens, SMALL_OUTPUT_BYTES // 4)
    packed = pack_tokens([number] * tokens)
    return Output(request_id=RequestId(f"r{number}"), placement=1, first_index=0, tokens=packed, logprobs=logprobs)


messages = st.builds(
    lambda gateway, number, kind: SendTo(
        WorkerId(f"gateway-{gateway}"),
        gateway + 1,
        Submitted(request_id=RequestId(f"r{number}"), placement=1) if kind == 0 else output(number, (1, 100)[kind - 1]),
    ),
    st.integers(0, 2),
    st.integers(0, 1000),
    st.integers(0, 2),
)


@given(st.lists(messages, max_size=40))
def test_each_peer_hears_the_same_in_the_same_order(posted: list[SendTo]) -> None:
    heard: dict[tuple[WorkerId, int], list[object]] = {}
    for sent in gathered(posted):
        frame = decode_frame(encode_frame(Frame(SENDER, Epoch(sent.epoch), sent.body)))
        bodies = frame.body.parts if isinstance(frame.body, Outputs) else (frame.body,)
        heard.setdefault((sent.worker, sent.epoch), []).extend(bodies)
    said: dict[tuple[WorkerId, int], list[object]] = {}
    for message in posted:
        said.setdefault((message.worker, message.epoch), []).append(message.body)
    assert heard == said


def test_a_step_of_many_streams_is_few_frames_and_none_is_too_long() -> None:
    step = [SendTo(WorkerId("gateway-0"), 1, output(n, SMALL_OUTPUT_BYTES // 4)) for n in range(2 * MAX_OUTPUTS + 1)]
    frames = [encode_frame(Frame(SENDER, Epoch(1), sent.body)) for sent in gathered(step)]
    assert len(frames) == 3
    assert max(map(len, frames)) < MAX_FRAME_BYTES


def test_token_ids_that_are_cut_short_are_no_frame() -> None:
    odd = Output(request_id=RequestId("r"), placement=0, first_index=0, tokens=b"\x01\x02\x03")
    data = encode_frame(Frame(SENDER, Epoch(1), Outputs(parts=(output(1), odd))))
    with pytest.raises(MalformedFrame, match="tokens"):
        decode_frame(data)
