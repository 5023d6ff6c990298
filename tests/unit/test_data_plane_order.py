"""The order in which a real data plane works, and what it holds at most."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from baton.common.config import TransferConfig
from baton.common.kv.layout import KvLayout
from baton.transfer.session.effects import Landed, RegionReady, SinkPrepared
from baton.transfer.testing import closing_both
from baton.transfer.testing_ends import End, EndKeys, EndSpec, HandOff, KvSpec, pump
from baton.transfer.transports.inproc import InprocHub
from baton.transfer.turns import TURN_BYTES

LARGE_PAGES = KvSpec(KvLayout(4), ((64, 256 << 10),))
"""So that a region of four pages is a whole turn."""
LANES = ["inproc", "local", "tcp", "zmq"]
ALL = np.arange(1, 61, dtype=np.int32)


@pytest.fixture(params=LANES)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[End, End]]:
    keys, hub, lane = EndKeys.generate(), InprocHub(), request.param
    config = TransferConfig(
        lanes=(lane,),
        staging_ring_bytes=8 * TURN_BYTES,
        region_bytes=TURN_BYTES,
        direct_region_bytes=TURN_BYTES,
        credit_regions=2,
        digest="full",
    )
    sink = End(EndSpec("sink", 7, lane, keys, config, LARGE_PAGES), hub)
    source = End(EndSpec("source", 8, lane, keys, config, LARGE_PAGES, fill=1), hub)
    sink.set_peers([source.member])
    with closing_both((sink, source)) as both:
        yield both


def order_of(end: End, kind: type, hand_offs: list[HandOff]) -> list[int]:
    """Which of `hand_offs` each event of a kind was about."""
    keys = [hand_off.key for hand_off in hand_offs]
    return [keys.index(event.key) for event in end.events if isinstance(event, kind)]


def test_a_short_hand_off_is_not_held_up_by_a_long_one(pair: tuple[End, End]) -> None:
    sink, source = pair
    long, short = HandOff(sink, source, ALL[:24], ALL[24:48]), HandOff(sink, source, ALL[48:50], ALL[50:52])
    for hand_off in (long, short):
        hand_off.prepare()
    parts = [slice(first, first + 4) for first in range(0, 24, 4)]
    for seq, part in enumerate(parts):
        long.send(seq, part)
    short.send(0, slice(0, 2))
    assert pump([source], lambda: len(order_of(source, RegionReady, [long, short])) >= 4)
    assert 1 in order_of(source, RegionReady, [long, short])[:3], "gathered behind the long one"


def test_what_needs_no_slot_takes_turns_at_the_receiver(pair: tuple[End, End]) -> None:
    sink, source = pair
    if sink.spec.lane not in ("local", "tcp"):
        return  # the sender's slots decide
    long = [HandOff(sink, source, ALL[first : first + 16], ALL[first : first + 16]) for first in (0, 16)]
    short = HandOff(sink, source, ALL[32:33], ALL[32:33])
    chunks = []
    for hand_off, sizes in ((long[0], 4), (long[1], 4), (short, 1)):
        hand_off.prepare()
        parts = [slice(4 * seq, min(4 * seq + 4, len(hand_off.sink_pages))) for seq in range(sizes)]
        for seq, part in enumerate(parts):
            hand_off.send(seq, part)
            ready = hand_off.ready(seq)
            chunks.append((hand_off, hand_off.chunk(seq, part, ready.nbytes, ready.digest)))
    for hand_off, chunk in chunks:
        hand_off.land(chunk)
    hand_offs = [*long, short]
    assert pump([sink, source], lambda: len(order_of(sink, Landed, hand_offs)) == 9)
    assert order_of(sink, Landed, hand_offs).index(2) < 6, "the short one came behind the long ones"


def test_a_thousand_at_once_all_finish_and_hold_no_more_than_the_rings(pair: tuple[End, End]) -> None:
    sink, source = pair
    hand_offs = [HandOff(sink, source, ALL[:1], ALL[n % 60 : n % 60 + 1]) for n in range(1000)]
    for hand_off in hand_offs:
        hand_off.ask_to_prepare()
    by_key = {hand_off.key: hand_off for hand_off in hand_offs}
    landed = 0

    def go_on() -> bool:
        nonlocal landed
        events, sink.events, announced, source.events = sink.events, [], source.events, []
        for event in events:
            if isinstance(event, SinkPrepared):
                by_key[event.key].send(0, slice(0, 1))
            elif isinstance(event, Landed):
                by_key[event.key].close()
                landed += 1
        for event in announced:
            if isinstance(event, RegionReady):
                one = by_key[event.key]
                one.land(one.chunk(0, slice(0, 1), event.nbytes, event.digest))
        receive, send = sink.slots()[0], source.slots()[1]
        assert sum(receive) == sum(send) == 8
        return landed == len(hand_offs)

    assert pump([sink, source], go_on, wait_s=50)
    assert sink.slots()[0] == (8, 0, 0)
    assert pump([sink, source], lambda: source.slots()[1] == (8, 0, 0))
    snapshot = sink.data.snapshot(0.0)
    assert (snapshot.waiting_sinks, snapshot.open_sinks, snapshot.open_operations) == (0, 0, 0)
