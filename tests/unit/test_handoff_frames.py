"""Frames of a hand-off on the wire: small for models of one component, and nothing odd gets through."""

from __future__ import annotations

import msgspec
import pytest

from baton.common.ids import Epoch, HandoffId, HandoffKey, RequestId, Stamp, WorkerId
from baton.common.kv.layout import Component
from baton.common.messages import (
    MAX_REGION_UNITS,
    Chunk,
    Done,
    Frame,
    MalformedFrame,
    Offer,
    SamplingParams,
    decode_frame,
    encode_frame,
    pack_tokens,
)

KEY = HandoffKey(HandoffId(7), 1)
CHUNK = Chunk(key=KEY, seq=0, tag=9, first_unit=3, units=2, nbytes=64, digest=2**64 - 1)
OFFER = Offer(
    key=KEY,
    request_id=RequestId("r"),
    tokens=pack_tokens([1, 2, 3]),
    start=0,
    sample=True,
    sampling=SamplingParams(),
    ttl_s=1.0,
    lane="zmq",
    credit=1,
    region_units=(4, 2, 1),
    tag_base=5,
)


def encoded(body: Chunk | Done | Offer) -> bytes:
    return encode_frame(Frame(Stamp(WorkerId("p"), 1, Epoch(2)), Epoch(3), body))


def with_fields(body: Chunk | Done | Offer, **changes: object) -> bytes:
    """The frame of `body` with fields that the types here would not allow."""
    src, epoch, fields = msgspec.msgpack.decode(encoded(body))
    return msgspec.msgpack.encode([src, epoch, fields | changes])


@pytest.mark.parametrize("component", Component)
def test_chunks_of_every_component_come_through(component: Component) -> None:
    chunk = msgspec.structs.replace(CHUNK, component=component, source_pages=pack_tokens([4, 5]))
    assert decode_frame(encoded(chunk)).body == chunk


def test_a_chunk_of_full_attention_does_not_name_it() -> None:
    assert decode_frame(encoded(CHUNK)).body == CHUNK
    assert b"component" not in encoded(CHUNK)


@pytest.mark.parametrize(
    "changes",
    [
        {"component": "everything"},
        {"component": 1},
        {"first_unit": -1},
        {"units": 0},
        {"units": MAX_REGION_UNITS + 1},
        {"first_token": 3},
        {"source_pages": b"abc"},
        {"source_pages": bytes(4 * MAX_REGION_UNITS + 4)},
    ],
)
def test_a_chunk_that_cannot_be_is_no_frame(changes: dict[str, object]) -> None:
    with pytest.raises(MalformedFrame):
        decode_frame(with_fields(CHUNK, **changes))


@pytest.mark.parametrize("region_units", [[0], [1, 1, 1, 1], [MAX_REGION_UNITS + 1], 4])
def test_an_offer_of_impossible_regions_is_no_frame(region_units: object) -> None:
    assert decode_frame(encoded(OFFER)).body == OFFER
    with pytest.raises(MalformedFrame):
        decode_frame(with_fields(OFFER, region_units=region_units))


@pytest.mark.parametrize("first_token", [-2, 1 << 31])
def test_a_first_token_that_is_no_token_id_is_no_frame(first_token: int) -> None:
    done = Done(key=KEY, regions=1, total_tokens=3, first_token=5)
    assert decode_frame(encoded(done)).body == done
    with pytest.raises(MalformedFrame):
        decode_frame(with_fields(done, first_token=first_token))
