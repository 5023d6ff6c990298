"""What a broken or malicious peer says: frames of every kind with values at and beyond the edges of what decodes, and
frames whose bytes were put together by somebody who knows msgpack. Seeded, so that a frame can be made again.
"""

from __future__ import annotations

import random

import msgspec
from chaos_fuzz import BODIES, damaged, fields_of, random_value
from msgspec import structs

from baton.common.ids import Epoch, HandoffKey, RequestId, Stamp
from baton.common.messages import MAX_FRAME_BYTES, Body, Frame, Heartbeat, Load, encode_frame

MOST_OPEN = 64
"""So many keys and request ids are remembered to speak of."""
_NASTY: tuple[object, ...] = (
    None, True, -1, 0, 1 << 31, (1 << 63) - 1, (1 << 64) - 1, -(1 << 63), float("nan"), float("inf"), -float("inf"),
    1e308, -0.0, "", "\0", "x" * 300, "é" * 200, "../../etc/passwd", b"", b"\xff" * 7, b"\0" * 300, [], {}, [[]],
    {"": None}, {1: 2}, [0] * 70,
)  # fmt: skip


class Words:
    """Makes frames that pretend to come from `stamp`. What the peer is known to have open is spoken of."""

    def __init__(self, dice: random.Random, stamp: Stamp) -> None:
        self.dice = dice
        self.stamp = stamp
        self.keys: list[HandoffKey] = []
        self.requests: list[RequestId] = []
        self.heard: list[Body] = []
        self.others: list[Stamp] = []

    def note(self, body: Body) -> None:
        """Something that came: the next words will be about it."""
        self.heard = [*self.heard[-MOST_OPEN:], body]
        if (key := getattr(body, "key", None)) is not None and key not in self.keys:
            self.keys = [*self.keys[-MOST_OPEN:], key]
        if (request := getattr(body, "request_id", None)) is not None and request not in self.requests:
            self.requests = [*self.requests[-MOST_OPEN:], request]

    def body(self, kinds: tuple[type[Body], ...] = BODIES) -> Body:
        """Of any type, about something that is known here, more often than not."""
        dice = self.dice
        kind = dice.choice(kinds)
        values = {name: random_value(dice, type_of) for name, type_of in fields_of(kind)}
        if "key" in values and self.keys and dice.random() < 0.8:
            values["key"] = dice.choice(self.keys)
        if "request_id" in values and self.requests and dice.random() < 0.8:
            values["request_id"] = dice.choice(self.requests)
            if "placement" in values:
                values["placement"] = dice.choice((0, 0, 0, 1, 1 << 40))
        return kind(**values)

    def varied(self, body: Body) -> Body:
        """But for a field or two."""
        dice = self.dice
        fields = [(name, kind) for name, kind in fields_of(type(body)) if name != "key" or dice.random() < 0.05]
        changes: dict[str, object] = {}
        for name, kind in dice.sample(fields, min(len(fields), dice.choice((1, 1, 2)))):
            before = getattr(body, name)
            near = isinstance(before, int) and not isinstance(before, bool) and dice.random() < 0.5
            changes[name] = before + dice.choice((-2, -1, 1, 2)) if near else random_value(dice, kind)
        return structs.replace(body, **changes)

    def frame(self, dst_epoch: int, body: Body) -> list[bytes]:
        """The parts of one ZMQ message that says this, or tries to."""
        dice, roll = self.dice, self.dice.random()
        if isinstance(body, Heartbeat):
            body = structs.replace(body, load=tame(body.load), leaving=False)
        src, dst = self.stamp, dst_epoch if dice.random() > 0.03 else dice.choice((1, (1 << 64) - 1))
        if self.others and dice.random() < 0.05:
            src = dice.choice(self.others)  # in another's name, the controller's too
        elif dice.random() < 0.02:
            src = Stamp(src.worker, src.incarnation + dice.choice((-1, 1, 1 << 40)), Epoch(dice.getrandbits(62)))
        try:
            data = encode_frame(Frame(src, Epoch(dst), body))
        except (OverflowError, msgspec.MsgspecError):
            return [dice.randbytes(40)]
        if roll < 0.55:
            return [data]
        if roll < 0.80:
            return [self.mutated(data)]
        if roll < 0.93:
            return [damaged(dice, data)]
        return self._odd_parts(data)

    def mutated(self, data: bytes) -> bytes:
        """The same tree of msgpack, with a node or two of another type, size, depth or name."""
        tree: list[object] = [msgspec.msgpack.decode(data)]
        for _ in range(self.dice.choice((1, 1, 2, 3))):
            self._change(tree)
        try:
            return msgspec.msgpack.encode(tree[0])
        except (OverflowError, msgspec.MsgspecError, RecursionError):
            return b"\xdd\xff\xff\xff\xff"  # a list of four billion, of which nothing comes

    def _change(self, node: list[object] | dict[object, object]) -> None:
        """Walks down to somewhere, and changes what is there."""
        dice = self.dice
        while True:
            places: list[object] = list(node) if isinstance(node, dict) else list(range(len(node)))
            if not places:
                return
            place = dice.choice(places)
            inner = node[place]  # type: ignore[index]
            if not isinstance(inner, list | dict) or not inner or dice.random() < 0.15:
                break
            node = inner
        match dice.randrange(5):
            case 0 if isinstance(node, dict):
                del node[place]
            case 1 if isinstance(node, dict):
                node[dice.choice(("type", "extra", "__class__", 7))] = dice.choice(("Hello", "NoSuch", 3, None))
            case 2:
                node[place] = self._deep(inner)  # type: ignore[index]
            case 3 if isinstance(inner, bytes):
                node[place] = inner + dice.randbytes(dice.choice((1, 3, 4, 8)))  # type: ignore[index]
            case _:
                node[place] = dice.choice(_NASTY)  # type: ignore[index]

    def _deep(self, inner: object) -> object:
        for _ in range(self.dice.choice((1, 2, 2, 300))):
            inner = [inner]
        return inner

    def _odd_parts(self, data: bytes) -> list[bytes]:
        """A message that is not one frame, or one that is larger than any, or deeper."""
        dice = self.dice
        match dice.randrange(8):
            case 0:
                return [b""]
            case 1:
                return [data, data]
            case 2:
                return [dice.randbytes(3)] * dice.choice((3, 200))
            case 3:
                return [b"", data]
            case 4:
                return [b"\x91" * 5000 + b"\xc0"]
            case 5:
                return [b"\xdf\xff\xff\xff\xff" + data]  # a map of four billion entries
            case 6:
                return [b"\xdb\xff\xff\xff\xf0" + data]  # a text of four billion bytes
            case _:
                return [bytes(MAX_FRAME_BYTES + 1)] if dice.random() < 0.01 else [b"\xc1" * 10_000]


def tame(load: Load) -> Load:
    """Its sender wants to stay a member, and to be given nothing by those who are honest."""
    return structs.replace(load, draining=True, step_age_s=0.0)
