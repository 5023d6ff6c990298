"""Members of the cluster that have gone mad: they hold keys, are admitted, say that they live, begin what honest
members begin, and then say anything. One for each role, on real sockets.

What they may not do is lie about what they were honestly asked for: a prefill worker that is believed may name any
token. So they drain (nobody honest chooses them), and refuse what is not of their own kind.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import numpy as np
import zmq
from fuzz_words import Words

from baton.common.config import KvConfig
from baton.common.engine.fake_runner import fake_runner
from baton.common.errors import ErrorCode
from baton.common.ids import CONTROLLER, Epoch, HandoffId, HandoffKey, RequestId, Stamp, WorkerId
from baton.common.kv.layout import Component
from baton.common.messages import (
    PROTOCOL_VERSION,
    Accept,
    Ack,
    Body,
    Cancel,
    CancelRequest,
    Chunk,
    Commit,
    Done,
    Failed,
    Failure,
    FinishAck,
    Frame,
    Grammar,
    Heartbeat,
    Hello,
    KvEvents,
    KvSnapshot,
    LaneAddress,
    Load,
    Member,
    Membership,
    Nack,
    Offer,
    Output,
    Refuse,
    Resume,
    SamplingParams,
    Submit,
    Submitted,
    Ticket,
    pack_tokens,
)
from baton.transfer.keys import ControllerDoor, KeyPair
from baton.transfer.membership import SPEAKS_TO
from baton.transfer.mesh import Mesh
from baton.transfer.session.tickets import Tickets

BEAT_S = 0.1
SEND_WITHIN_S = 20.0
OURS = "mad-"
PAGE_SIZE = KvConfig().page_size
PAGE_BYTES = fake_runner({Component.FULL: 2}, PAGE_SIZE).memory.main.page_bytes
_NOTHING = Failure(code=ErrorCode.CANCELLED, reason="mad")


class RawMesh(Mesh):
    """Sends anything to whom it knows."""

    def say(self, worker: WorkerId, parts: list[bytes]) -> None:
        socket = self._peers[worker][1]
        if not socket.poll(round(SEND_WITHIN_S * 1000), zmq.POLLOUT):
            raise AssertionError(f"{worker} has not read for {SEND_WITHIN_S} s")
        socket.send_multipart(parts)


class Mad:
    """`fingerprint`: as honest workers have it. `tick` often; `speak` sends one fuzzed message."""

    def __init__(
        self,
        worker: str,
        role: str,
        incarnation: int,
        controller: ControllerDoor,
        dice: random.Random,
        fingerprint: dict[str, str],
        lanes: Callable[[Stamp, KeyPair], tuple[LaneAddress, ...]] = lambda stamp, keys: (),
    ) -> None:
        self.dice = dice
        self.keys = KeyPair.generate()
        self._controller = controller
        self.stamp = Stamp(WorkerId(worker), incarnation, Epoch(dice.getrandbits(62) + 1))
        self.mesh = RawMesh(self.stamp, "127.0.0.1", self.keys)
        self.words = Words(dice, self.stamp)
        self.member = Member(
            stamp=self.stamp,
            role=role,
            address=self.mesh.address,
            key=self.keys.public,
            lanes=lanes(self.stamp, self.keys),
            fingerprint=fingerprint,
        )
        self.members: dict[WorkerId, Member] = {}  # honest ones that let it in
        self.seen: dict[WorkerId, Member] = {}  # all honest ones
        self.listed = False
        self.alien_keys: set[HandoffKey] = set()  # of those who ask honestly: not to be spoken of
        self.foreign_keys: list[HandoffKey] = []  # of hand-offs between others
        self._beat_at_s = 0.0
        self.mesh.allow.set_controller(controller.key)
        self._find_controller()

    def _find_controller(self) -> None:
        door = self._controller
        self.mesh.connect(CONTROLLER, door.address, door.key, None if self.listed else door.guest)

    def close(self) -> None:
        self.mesh.close()

    def tick(self) -> None:
        """Hears what has come, and lives."""
        for frame in self.mesh.poll(0):
            if isinstance(frame.body, Membership):
                self._on_membership(frame.body)
                self.words.others = [frame.src, *(member.stamp for member in self.seen.values())]
            elif frame.src.worker != CONTROLLER:
                self.on_heard(frame)
        now = time.monotonic()
        if now >= self._beat_at_s:
            self._beat_at_s = now + BEAT_S
            beat = Heartbeat(load=Load(draining=True))
            self.mesh.send(
                CONTROLLER,
                Epoch(0),
                beat if self.listed else Hello(protocol_version=PROTOCOL_VERSION, member=self.member),
            )
            for worker, member in self.members.items():
                self.mesh.send(worker, member.stamp.epoch, beat)

    def _on_membership(self, view: Membership) -> None:
        self.listed = any(member.stamp == self.stamp for member in view.members)
        self._find_controller()
        self.mesh.allow.set_members(view.members)
        self.seen.update((one.stamp.worker, one) for one in view.members if one.stamp.worker.endswith("-0"))
        # Others do not let it in: nobody of their role has anything to say to them.
        self.members = {one.stamp.worker: one for one in self.seen.values() if one.role in SPEAKS_TO[self.member.role]}
        for worker, member in self.members.items():
            self.mesh.connect(worker, member.address, member.key)

    def on_heard(self, frame: Frame) -> None:
        self.words.note(frame.body)

    def speak(self) -> str:
        """To whom."""
        worker = self.dice.choice((CONTROLLER, *self.members))
        roll = self.dice.random()
        if worker != CONTROLLER and roll < 0.45:
            body = self.honest(worker)
            if roll < 0.25:
                body = self.words.varied(body)
        elif roll < 0.6 and self.foreign_keys:
            body = self.about_others()
        else:
            body = self.words.body()
        epoch = self.members[worker].stamp.epoch if worker != CONTROLLER else 0
        self.mesh.say(worker, self.words.frame(epoch, body))
        return worker

    def about_others(self) -> Body:
        """In the middle of a hand-off that is none of its business."""
        key = self.dice.choice(self.foreign_keys)
        kind = self.dice.choice((Commit, Accept, Cancel, Failed, Ack, Done))
        match kind.__name__:
            case "Commit" | "Accept":
                return kind(key=key)
            case "Cancel" | "Failed":
                return kind(key=key, failure=_NOTHING)
            case "Ack":
                return Ack(key=key, seq=self.dice.randrange(4), credit=1 << 20)
            case _:
                return Done(key=key, regions=1, total_tokens=self.dice.randrange(300), first_token=7)

    def honest(self, worker: WorkerId) -> Body:
        """What one in this role would say to it."""
        raise NotImplementedError


class MadGateway(Mad):
    def __init__(self, *arguments: object, **settings: object) -> None:
        super().__init__(*arguments, **settings)  # type: ignore[arg-type]
        self.number = 0

    def honest(self, worker: WorkerId) -> Body:
        dice = self.dice
        outputs = [body for body in self.words.heard if isinstance(body, Output | Submitted)]
        if not worker.startswith("decode") or not outputs or dice.random() < 0.3:
            return self._submit()
        output = dice.choice(outputs)
        same = {"request_id": output.request_id, "placement": output.placement}
        match dice.randrange(4):
            case 0:
                return CancelRequest(**same, answered=dice.random() < 0.5)
            case 1:
                return Resume(**same, next_index=dice.randrange(20))
            case _:
                return FinishAck(**same)

    def _submit(self) -> Submit:
        dice = self.dice
        self.number += 1
        grammar = None
        if dice.random() < 0.02:
            text = dice.choice(("[a-c]{3}", "(", "[0-9]+" * 20, "(((a*)*)*)*b", "\\", "[" * 40))
            grammar = Grammar(kind=dice.choice(("regex", "json_schema", "ebnf")), text=text)
        return Submit(
            request_id=RequestId(f"{OURS}{self.number}"),
            placement=dice.choice((0, 0, 1, 3)),
            prompt=pack_tokens([dice.randrange(258) for _ in range(dice.choice((1, 5, 40, 100)))]),
            sampling=SamplingParams(max_tokens=dice.choice((1, 4, 12)), grammar=grammar),
            ttl_s=dice.choice((0.0, 0.2, 1.0, 2.0)),
            prefill_worker=dice.choice((WorkerId("prefill-0"), WorkerId("prefill-1"), None)),
            session_id=dice.choice(("", "", "sess-mad")),
            session_turn=dice.choice((0, 1)),
        )


class MadDecode(Mad):
    def __init__(self, *arguments: object, **settings: object) -> None:
        super().__init__(*arguments, **settings)  # type: ignore[arg-type]
        self.tickets = Tickets(self.stamp, self._secret_with)

    def honest(self, worker: WorkerId) -> Body:
        dice = self.dice
        if worker.startswith("gateway"):
            return KvSnapshot(
                seq=dice.choice((1, 2, 1 << 40)), part=dice.randrange(5), parts=4, names=dice.randbytes(64)
            )
        accepted = [body for body in self.words.heard if isinstance(body, Accept | Chunk | Done | Failed)]
        if not accepted or dice.random() < 0.25:
            return self._offer(worker)
        body = dice.choice(accepted)
        match body:
            case Chunk() if dice.random() < 0.7:
                return Ack(key=body.key, seq=body.seq, credit=body.seq + 8)
            case Chunk():
                return Nack(key=body.key, seq=body.seq, tag=body.tag + 1000)
            case Done() if dice.random() < 0.7:
                return Commit(key=body.key)
            case _:
                return Cancel(key=body.key, failure=_NOTHING)

    def _secret_with(self, peer: Stamp) -> bytes:
        return self.keys.shared_with(self.members[peer.worker].key, "ticket")

    def _offer(self, worker: WorkerId) -> Offer:
        """With a good ticket, most of the time."""
        dice = self.dice
        key = HandoffKey(HandoffId(dice.getrandbits(62)), 1)
        tag_base = dice.getrandbits(40)
        ticket = self.tickets.issue(self.members[worker].stamp, key, tag_base)
        self.words.keys = [*self.words.keys[-60:], key]
        return Offer(
            key=key,
            request_id=RequestId(f"{OURS}offer-{key.handoff}"),
            tokens=pack_tokens([dice.randrange(258) for _ in range(dice.choice((1, 17, 64, 200)))]),
            start=dice.choice((0, 0, 16)),
            sample=dice.random() < 0.7,
            sampling=SamplingParams(),
            ttl_s=dice.choice((0.1, 0.5, 2.0)),
            lane=dice.choice(("local", "tcp", "zmq")),
            credit=dice.choice((1, 4)),
            region_units=(dice.choice((1, 4, 64)),),
            tag_base=tag_base,
            ticket=ticket if dice.random() < 0.9 else dice.choice((Ticket(), Ticket(number=ticket.number, mac=b"x"))),
        )


class MadPrefill(Mad):
    def on_heard(self, frame: Frame) -> None:
        body = frame.body
        if isinstance(body, Offer) and not body.request_id.startswith(OURS):
            self.alien_keys.add(body.key)
            refuse = Refuse(key=body.key, failure=Failure(code=ErrorCode.OVERLOADED, reason="drains"))
            self.mesh.send(frame.src.worker, frame.src.epoch, refuse)
        elif getattr(body, "key", None) not in self.alien_keys:
            self.words.note(body)
            if isinstance(body, Offer) and self.dice.random() < 0.6:  # so that the receiver gets as far as its lane
                total = len(body.tokens) // 4
                for answer in (Accept(key=body.key), self._chunk(body, total)):
                    self.mesh.send(frame.src.worker, frame.src.epoch, answer)

    def honest(self, worker: WorkerId) -> Body:
        dice = self.dice
        if worker.startswith("gateway"):
            return KvEvents(seq=dice.choice((1, 2, 3, 1 << 40)), stored=dice.randbytes(8 * dice.randrange(40)))
        offers = [body for body in self.words.heard if isinstance(body, Offer)]
        if not offers:
            return self.words.body()
        offer = dice.choice(offers[-8:])
        total = len(offer.tokens) // 4
        match dice.randrange(8):
            case 0 | 1:
                return Accept(key=offer.key)
            case 2:
                return Done(key=offer.key, regions=dice.choice((0, 1, 2)), total_tokens=total, first_token=7)
            case 3:
                return Failed(key=offer.key, failure=_NOTHING)
            case _:
                return self._chunk(offer, total)

    def _chunk(self, offer: Offer, total: int) -> Chunk:
        dice = self.dice
        most = -(-(total - offer.start) // PAGE_SIZE)
        seq, first = dice.choice(((0, 0), (0, 0), (0, 0), (1, 1), (0, 1)))
        units = max(1, min(most - first, *offer.region_units, 1 if seq else dice.choice((1, 64))))
        pages = [dice.choice((1, 2, 5, 200) if dice.random() < 0.95 else (1 << 20, -1)) for _ in range(units)]
        return Chunk(
            key=offer.key,
            seq=seq,
            tag=offer.tag_base + seq,
            first_unit=first,
            units=units,
            nbytes=units * PAGE_BYTES,
            digest=dice.getrandbits(64),
            source_pages=np.array(pages, dtype="<i4").tobytes() if dice.random() < 0.7 else b"",
        )
