"""Frames as nobody should send them: any type, any value that its field can hold (and some that it cannot), and bytes
that are no frames at all. Types are read off the wire vocabulary, so a new message is fuzzed from its first day."""

from __future__ import annotations

import random
import typing
from functools import cache

import msgspec
from msgspec import inspect, structs

from baton.common.ids import CONTROLLER, Epoch, Stamp, WorkerId
from baton.common.messages import MAX_FRAME_BYTES, Body, Frame, encode_frame
from baton.common.prompt_logprobs import PromptLogprobs

BODIES: tuple[type[Body], ...] = typing.get_args(Body)
_INTS = (
    0,
    1,
    2,
    3,
    4,
    7,
    15,
    41,
    255,
    (1 << 16) + 1,
    (1 << 31) - 1,
    1 << 31,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
    -1,
)
_FLOATS = (0.0, 0.5, 1.0, -1.0, 1e9, 1e308, float("inf"), float("nan"))
_STRINGS = ("", "zmq", "tcp", "local", "ucx", "inproc", "prefill-0", "decode-0", "no_worker", "x" * 300, "\0", "tcp://")


def random_body(dice: random.Random) -> Body:
    return random_struct(dice, dice.choice(BODIES))


@cache
def fields_of(kind: type) -> tuple[tuple[str, inspect.Type], ...]:
    """Names and types of a struct's fields. To look at a type takes a hundred times as long as to draw a value."""
    return tuple((field.name, inspect.type_info(field.type)) for field in structs.fields(kind))


def random_struct(dice: random.Random, kind: type[Body]) -> Body:
    return kind(**{name: random_value(dice, type_of) for name, type_of in fields_of(kind)})


def varied(dice: random.Random, body: Body) -> Body:
    """The same, but for a field or two; or another message about the same."""
    if dice.random() < 0.3:
        other = random_body(dice)
        same = {name: getattr(body, name) for name in ("key", "request_id") if hasattr(body, name)}
        return structs.replace(other, **{name: value for name, value in same.items() if hasattr(other, name)})
    fields = [field for field in fields_of(type(body)) if field[0] != "key" or dice.random() < 0.1]
    if not fields:
        return body
    changes = {}
    for name, type_of in dice.sample(fields, min(len(fields), dice.choice((1, 1, 2)))):
        before = getattr(body, name)
        if isinstance(before, int) and dice.random() < 0.5:
            changes[name] = before + dice.choice((-2, -1, 1, 2))
        else:
            changes[name] = random_value(dice, type_of)
    return structs.replace(body, **changes)


def random_value(dice: random.Random, kind: inspect.Type) -> object:
    """Mostly what decodes, at the edges of what does."""
    match kind:
        case inspect.IntType(ge=ge, le=le):
            low, high = ge if ge is not None else -(1 << 63), le if le is not None else (1 << 64) - 1
            fitting = [value for value in (*_INTS, low, high) if low <= value <= high]
            return dice.choice(fitting if dice.random() < 0.98 else _INTS)
        case inspect.FloatType():
            return dice.choice(_FLOATS)
        case inspect.BoolType():
            return dice.random() < 0.5
        case inspect.StrType():
            return dice.choice(_STRINGS)
        case inspect.BytesType():
            return dice.randbytes(dice.choice((0, 4, 8, 16, 64, 400, 3)))
        case inspect.NoneType():
            return None
        case inspect.EnumType(cls=cls):
            return dice.choice(list(cls))
        case inspect.LiteralType(values=values):
            return dice.choice(values)
        case inspect.Metadata(type=inner):
            return random_value(dice, inner)
        case inspect.UnionType(types=types):
            return random_value(dice, dice.choice(types))
        case inspect.StructType(cls=cls) if cls is PromptLogprobs:  # whose parts must fit each other
            tokens, best = 4 * dice.randrange(4), dice.randrange(3)
            lengths = (tokens, tokens, tokens * best, tokens * best)
            return cls(**{name: dice.randbytes(n) for name, n in zip(cls.__struct_fields__, lengths, strict=True)})
        case inspect.StructType(cls=cls):
            return cls(**{name: random_value(dice, type_of) for name, type_of in fields_of(cls)})
        case inspect.VarTupleType(item_type=item):
            return tuple(random_value(dice, item) for _ in range(dice.randrange(4)))
        case inspect.TupleType(item_types=items):
            return tuple(random_value(dice, item) for item in items)
        case inspect.DictType(key_type=key, value_type=value):
            return {random_value(dice, key): random_value(dice, value) for _ in range(dice.randrange(3))}
        case _:
            raise NotImplementedError(f"nothing random of type {kind}")


def encoded(dice: random.Random, src: Stamp, dst_epoch: Epoch, body: Body) -> bytes:
    """Now and then of another process, or for another one; never the controller's, whom everybody must believe."""
    if dice.random() < 0.05:
        src = Stamp(
            WorkerId(dice.choice(("decode-0", "prefill-0", "x"))), dice.choice(_INTS), Epoch(dice.choice(_INTS))
        )
    if dice.random() < 0.05:
        dst_epoch = Epoch(dice.choice(_INTS))
    assert src.worker != CONTROLLER
    try:
        return encode_frame(Frame(src, dst_epoch, body))
    except (OverflowError, msgspec.MsgspecError):  # an integer that no frame can hold
        return b""


def damaged(dice: random.Random, data: bytes) -> bytes:
    """Cut, grown or with bits turned over."""
    match dice.randrange(4):
        case 0:
            return data[: dice.randrange(len(data) + 1)]
        case 1:
            return data + dice.randbytes(dice.randrange(1, 20))
        case 2:
            out = bytearray(data)
            for _ in range(dice.randrange(1, 4)):
                if out:
                    out[dice.randrange(len(out))] ^= 1 << dice.randrange(8)
            return bytes(out)
        case _:
            return dice.randbytes(dice.choice((0, 1, 8, 100, 5000)))


def odd_parts(dice: random.Random, data: bytes) -> list[bytes]:
    """A ZMQ message that is not one frame, or an oversized one."""
    match dice.randrange(5):
        case 0:
            return [b""]
        case 1:
            return [data, data]
        case 2:
            return [dice.randbytes(3)] * dice.choice((3, 200))
        case 3:
            return [b"", data]
        case _:
            return [bytes(MAX_FRAME_BYTES + 1)] if dice.random() < 0.05 else [b"\xc1" * 100_000]
