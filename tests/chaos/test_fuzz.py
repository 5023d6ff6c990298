"""Nothing that comes over a socket ends a worker, holds up its hand-offs, or makes it grow.

The decoder and the endpoint by themselves, with Hypothesis; then a live cluster with members that have gone mad, and
with strangers at every door.
"""

from __future__ import annotations

import contextlib
import random
import socket
import time

import numpy as np
import pytest
import zmq
from chaos_fuzz import BODIES, damaged, encoded, random_body, random_struct, varied
from chaos_mesh import FrameFaults
from chaos_peer import Pace
from chaos_rig import ChaosCluster, chaos_config
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.common.config import TransferConfig
from baton.common.engine.core_api import MembershipView
from baton.common.errors import ErrorCode
from baton.common.ids import Epoch, HandoffId, HandoffKey, RequestId, Stamp, WorkerId
from baton.common.kv.layout import Component, KvLayout
from baton.common.messages import (
    Failure,
    Frame,
    HandoffBody,
    LaneAddress,
    MalformedFrame,
    Member,
    SamplingParams,
    decode_frame,
)
from baton.transfer.api import AbortSource, FinishSource, OfferReceived, OpenSink, PrefillResult, ShipRegion
from baton.transfer.endpoint import Endpoint
from baton.transfer.keys import KeyPair
from baton.transfer.plan import segments_of
from baton.transfer.session.effects import (
    EndpointEffect,
    EngineEvent,
    FenceSink,
    FenceSource,
    Landed,
    LandRegion,
    PrepareSink,
    RegionDamaged,
    RegionReady,
    SendFrame,
    SendRegion,
    SinkFenced,
    SinkPrepared,
    SourceFenced,
)
from baton.transfer.testing_ends import End, EndKeys, EndSpec, small_config

ME, PEER, OTHER = (Stamp(WorkerId(name), 1, Epoch(number)) for number, name in enumerate(("me", "peer", "other"), 5))
LAYOUT = KvLayout(4, window=9, state=True)
LAYERS = {Component.FULL: 4, Component.SWA: 4}
MOST_LIVE = 8
dices = st.integers(0, (1 << 64) - 1).map(random.Random)


@given(dices)
@settings(max_examples=20, deadline=None)
def test_the_decoder_takes_a_frame_or_says_that_it_is_none(dice: random.Random) -> None:
    for kind in BODIES:
        data = encoded(dice, PEER, ME.epoch, random_struct(dice, kind))
        for candidate in (data, damaged(dice, data)):
            with contextlib.suppress(MalformedFrame):
                assert isinstance(decode_frame(candidate), Frame)


class _World:
    """An endpoint with open sinks and sources of a mad peer, and a data plane and an engine that answer at once."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.now = 0.0
        self.sent: list[HandoffBody] = []
        self.keys: list[HandoffKey] = []
        config = TransferConfig(max_tombstones=16, tombstone_ttl_s=5.0)
        self.endpoint = Endpoint(
            ME, config, LAYOUT, ["zmq", "local"], state_pieces=2, layers=LAYERS, max_live_sources=MOST_LIVE
        )
        members = tuple(Member(stamp=stamp, role="x", address="tcp://127.0.0.1:1") for stamp in (ME, PEER, OTHER))
        self.do(self.endpoint.on_membership(MembershipView(1, members), 0.0))

    def open_sink(self) -> None:
        key = HandoffKey(HandoffId(self.dice.getrandbits(62)), 1)
        self.keys.append(key)
        pages = {
            one.component: np.arange(1, 1 + one.units, dtype=np.int32) for one in segments_of(LAYOUT, 0, 37, 1, LAYERS)
        }
        command = OpenSink(
            key=key, peer=PEER.worker, request_id=RequestId("r"), tokens=np.zeros(37, dtype=np.int32), start=0,
            pages=pages, sample=True, sampling=SamplingParams(), deadline_s=self.now + 3.0,
        )  # fmt: skip
        self.do(self.endpoint.command(command, self.now))

    def hear(self) -> None:
        """A frame of the mad peer: something that was said before, varied, or anything."""
        dice = self.dice
        body = varied(dice, dice.choice(self.sent)) if self.sent and dice.random() < 0.6 else random_body(dice)
        if hasattr(body, "key") and self.keys and dice.random() < 0.6:
            body = type(body)(
                **{**{f: getattr(body, f) for f in body.__struct_fields__}, "key": dice.choice(self.keys)}
            )
        try:
            frame = decode_frame(encoded(dice, PEER, ME.epoch, body))
        except MalformedFrame:
            return
        if isinstance(frame.body, HandoffBody):
            if len(self.keys) < 100:
                self.keys.append(frame.body.key)
            self.do(self.endpoint.on_frame(frame, self.now))

    def pass_time(self) -> None:
        self.now += self.dice.uniform(0, 0.5)
        self.do(self.endpoint.on_timer(self.now))

    def do(self, effects: list[EndpointEffect]) -> None:
        waiting = list(effects)
        while waiting:
            effect = waiting.pop(0)
            match effect:
                case SendFrame(body=body):
                    assert isinstance(body, HandoffBody)
                    self.sent = [*self.sent[-50:], body]
                case EngineEvent(OfferReceived() as offer):
                    waiting += self._prefill(offer)
                case PrepareSink(key=key):
                    lane = self.dice.choice(("zmq", "local"))
                    units = tuple(self.dice.randint(1, 4) for _ in effect.spans)
                    waiting += self.endpoint.on_data(SinkPrepared(key, lane, 2, units), self.now)
                case LandRegion(key=key, chunk=chunk):
                    landed = self.dice.random() < 0.8
                    event = Landed(key, chunk.seq, chunk.nbytes, 0.0) if landed else RegionDamaged(key, chunk.seq)
                    waiting += self.endpoint.on_data(event, self.now)
                case SendRegion(key=key, seq=seq, tag=tag):
                    waiting += self.endpoint.on_data(RegionReady(key, seq, tag, 100, 1), self.now)
                case FenceSink(key=key):
                    waiting += self.endpoint.on_data(SinkFenced(key), self.now)
                case FenceSource(key=key):
                    waiting += self.endpoint.on_data(SourceFenced(key), self.now)
                case _:
                    pass

    def _prefill(self, offer: OfferReceived) -> list[EndpointEffect]:
        if self.dice.random() < 0.1 or len(offer.tokens) > 400:
            failure = Failure(code=ErrorCode.DRAINING, reason="not now")
            return self.endpoint.command(AbortSource(offer.key, failure), self.now)
        effects: list[EndpointEffect] = []
        for one in segments_of(LAYOUT, offer.start, len(offer.tokens), 1, LAYERS):
            pages = np.arange(1, 1 + one.units, dtype=np.int32)
            tokens = one.end_token - one.first_token
            effects += self.endpoint.command(
                ShipRegion(offer.key, one.first_token, tokens, pages, one.component), self.now
            )
        result = PrefillResult(3 if offer.sample else -1, None, 0.0, 0)
        return [*effects, *self.endpoint.command(FinishSource(offer.key, result), self.now)]


@given(dices)
@settings(max_examples=25, deadline=None)
def test_an_endpoint_takes_whatever_a_peer_can_send_and_stays_bounded(dice: random.Random) -> None:
    world = _World(dice)
    for number in range(150):
        if number % 30 == 0:
            world.open_sink()
        world.hear()
        if number % 5 == 0:
            world.pass_time()
    endpoint = world.endpoint
    assert endpoint.live_sources <= MOST_LIVE
    assert len(endpoint.sessions()) <= MOST_LIVE + 4 * 16 + 5
    world.now += 400.0  # past every deadline, and whoever read is proven dead
    world.do(endpoint.on_timer(world.now))
    world.do(endpoint.on_membership(MembershipView(2, ()), world.now))
    assert (endpoint.live_sinks, endpoint.live_sources) == (0, 0)


# ------------------------------------------------------------------------------------------------- live

HONEST, MAD = ("prefill-0", "decode-0"), ("prefill-1", "decode-1")
MOST_GROWTH_BYTES = 150 << 20


def besiege(lanes: tuple[str, ...], committed: int, seed: int) -> None:
    """Two honest workers, two mad ones that were let in, and strangers."""
    cluster = ChaosCluster(seed, proxied=False)
    dice, tally = random.Random(seed), cluster.tally
    try:
        for worker in (*HONEST, *MAD):
            faults = FrameFaults(mad=0.3) if worker in MAD else FrameFaults()
            cluster.start(worker, chaos_config(*lanes), faults, piece_delay_s=0.01)
        cluster.wait_up()
        before = {worker: cluster.account(worker) for worker in HONEST}
        for sink in ("decode-0", "decode-1"):
            cluster.peers[sink].send(Pace(6))
        until_s = time.monotonic() + 240.0
        with contextlib.closing(_Strangers(cluster, dice)) as strangers:  # else a failure hangs where its sockets are
            while tally.between_honest < committed:
                assert time.monotonic() < until_s, f"hand-offs hardly work: {tally}"
                strangers.knock()
                cluster.listen()
                time.sleep(0.005)
        cluster.peers["decode-0"].send(Pace(0))
        for worker in MAD:
            cluster.peers[worker].kill()
            cluster.hub.remove(worker)
            del cluster.peers[worker]
        accounts = cluster.accounts()
        cluster.listen()
        print(
            f"\nfuzz: {tally.between_honest} honest hand-offs, {strangers.knocks} strangers, mad: {dict(tally.failed)}"
        )
        for worker, account in accounts.items():
            assert account.clean, account
            assert not account.written_after_return, account
            assert account.frames["malformed"], "no bad frame has come"
            assert account.rss_bytes - before[worker].rss_bytes < MOST_GROWTH_BYTES
        assert not tally.wrong_bytes
    finally:
        cluster.close()


class _Strangers:
    """Without keys: at the control sockets and at the doors of the lanes."""

    def __init__(self, cluster: ChaosCluster, dice: random.Random) -> None:
        self._dice = dice
        self._doors: list[tuple[str, int]] = []
        for worker in HONEST:
            member = cluster.hub.known[WorkerId(worker)]
            self._doors.append(("zmq", int(member.address.rpartition(":")[2])))
            for lane in member.lanes:
                if lane.lane == "zmq":
                    self._doors.append(("zmq", int(str(lane.address["tcp"]).rpartition(":")[2])))
                elif lane.lane == "tcp":
                    self._doors.append(("raw", int(lane.address["port"])))
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._open: list[socket.socket | zmq.Socket[bytes]] = []
        self.knocks = 0

    def knock(self) -> None:
        kind, port = self._dice.choice(self._doors)
        self.knocks += 1
        if kind == "zmq" and self._dice.random() < 0.5:
            dealer = self._context.socket(zmq.DEALER)
            dealer.linger = 0
            dealer.connect(f"tcp://127.0.0.1:{port}")
            with contextlib.suppress(zmq.Again):
                dealer.send(encoded(self._dice, PEER, Epoch(0), random_body(self._dice)), zmq.NOBLOCK)
            self._open.append(dealer)
        else:
            try:
                raw = socket.create_connection(("127.0.0.1", port), timeout=1.0)
                raw.sendall(self._dice.randbytes(self._dice.choice((0, 1, 20, 512, 1024, 100_000))))
                self._open.append(raw)
            except OSError:
                pass  # shown the door
        if len(self._open) > 40:
            self._open.pop(self._dice.randrange(40)).close()

    def close(self) -> None:
        for one in self._open:
            one.close()
        self._context.destroy(linger=0)


def test_workers_serve_on_among_mad_members_and_strangers() -> None:
    besiege(("tcp", "local", "zmq"), committed=100, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("lane", ["local", "tcp", "zmq"])
def test_workers_serve_on_for_long(lane: str) -> None:
    besiege((lane,), committed=1500, seed=2)


numbers = st.integers(-(1 << 63), (1 << 64) - 1) | st.integers(0, 70000)
addresses = st.dictionaries(
    st.sampled_from(
        ["tcp", "host", "port", "pid", "full_fd", "full_nonce", "full_units", "full_unit_bytes", "worker", "door", "x"]
    ),
    numbers | st.sampled_from(["", "tcp://", "tcp://\0:1", "tcp://127.0.0.1:99999", "127.0.0.1", "::1", "ab" * 16]),
)


@pytest.mark.parametrize("lane", ["local", "tcp", "zmq"])
def test_an_address_that_makes_no_sense_is_a_link_that_is_down(lane: str) -> None:
    end = End(EndSpec("sink", 7, lane, EndKeys.generate(), small_config(lane)))
    good = end.member.lanes[0].address

    @given(addresses, st.booleans())
    @settings(max_examples=100, deadline=None)
    def open_it(address: dict[str, str | int], on_top_of_a_good_one: bool) -> None:
        lanes = (LaneAddress(lane=lane, address={**good, **address} if on_top_of_a_good_one else address),)
        key = KeyPair.generate().public
        peer = Member(stamp=PEER, role="prefill", address="tcp://127.0.0.1:1", key=key, lanes=lanes)
        end.let_in(peer)
        end.set_peers([peer])
        end.step(0.0)
        end.set_peers([])
        end.step(0.0)

    try:
        open_it()
    finally:
        end.close()
