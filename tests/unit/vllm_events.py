"""How programs outside read KV events: the structures of vLLM's `distributed/kv_events.py`, of its first version and of
a later one, and a subscriber that asks for a replay, as in vLLM's example."""

from __future__ import annotations

from typing import Any

import msgspec
import zmq

TIMEOUT_MS = 20_000
END = (-1).to_bytes(8, "big", signed=True)


class Batch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class Event(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(Event):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None


class BlockRemoved(Event):
    block_hashes: list[int]


class AllBlocksCleared(Event):
    pass


class FirstBatch(Batch):
    """As it was in the beginning."""

    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


class LaterStored(BlockStored, tag="BlockStored"):
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None


class LaterRemoved(BlockRemoved, tag="BlockRemoved"):
    medium: str | None
    group_idx: int | None = None


class LaterBatch(Batch):
    """With what was added since."""

    events: list[LaterStored | LaterRemoved | AllBlocksCleared]


FIRST = msgspec.msgpack.Decoder(FirstBatch)
LATER = msgspec.msgpack.Decoder(LaterBatch)


class Subscriber:
    """Of one worker. Keeps which blocks it says are there, and checks that no number is left out."""

    def __init__(self, host: str, port: int, replay_port: int, topic: str = "") -> None:
        self._context = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.rcvtimeo = TIMEOUT_MS
        self._sub.connect(f"tcp://{host}:{port}")
        self._sub.subscribe(topic)
        self._replay_address = f"tcp://{host}:{replay_port}"
        self.topics: set[bytes] = set()
        self.next_number = 0
        self.tokens: dict[int, tuple[int, ...]] = {}  # of each block that is there: all until its end

    def close(self) -> None:
        self._sub.close(linger=0)
        self._context.term()

    def waits(self, timeout_ms: int) -> bool:
        """For news, not longer than that."""
        return bool(self._sub.poll(timeout_ms))

    def hear(self) -> None:
        """The next batch; what came before and was missed is asked for."""
        topic, packed, payload = self._sub.recv_multipart()
        self.topics.add(topic)
        number = int.from_bytes(packed, "big")
        if number > self.next_number:
            self.replay()
        if number == self.next_number:
            self._take(number, payload)

    def replay(self) -> list[int]:
        """Everything from the next number on. Which numbers came."""
        replay = self._context.socket(zmq.DEALER)
        replay.rcvtimeo = TIMEOUT_MS
        replay.connect(self._replay_address)
        replay.send_multipart((b"", self.next_number.to_bytes(8, "big")))
        came = []
        while True:
            empty, packed, payload = replay.recv_multipart()
            assert empty == b""
            if packed == END:
                assert payload == b""
                break
            came.append(int.from_bytes(packed, "big"))
            self._take(came[-1], payload)
        replay.close(linger=0)
        return came

    def _take(self, number: int, payload: bytes) -> None:
        if number < self.next_number:
            return
        assert number == self.next_number, f"{number} after {self.next_number - 1}"
        self.next_number += 1
        first, later = FIRST.decode(payload), LATER.decode(payload)
        assert (first.data_parallel_rank, len(first.events)) == (0, len(later.events))
        for event in later.events:
            match event:
                case LaterStored():
                    self._store(event)
                case LaterRemoved():
                    assert event.medium == "GPU"
                    for block in event.block_hashes:
                        del self.tokens[block]
                case AllBlocksCleared():
                    self.tokens.clear()

    def _store(self, event: LaterStored) -> None:
        assert (event.lora_id, event.lora_name, event.medium) == (None, None, "GPU")
        assert len(event.token_ids) == len(event.block_hashes) * event.block_size
        known = self.tokens[event.parent_block_hash] if event.parent_block_hash is not None else ()
        for place, block in enumerate(event.block_hashes):
            known += tuple(event.token_ids[place * event.block_size : (place + 1) * event.block_size])
            assert block not in self.tokens
            self.tokens[block] = known
