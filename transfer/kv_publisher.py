"""A worker's KV events for programs outside of the cluster, on the wire as vLLM publishes them.

Owns: a PUB socket, a ROUTER that replays, the thread that serves both, the numbers of the batches and the last of them.
Never: waits for a reader (PUB drops what a slow one does not take; it asks for a replay), reads KV, or checks who
reads: the format has no authentication, so the sockets are bound to the loopback interface unless the configuration
says otherwise.

On the wire (vLLM's `distributed/kv_events.py`, whose readers are SGLang's, Dynamo's and llm-d's too):

- PUB: [topic, number, payload]. The number is 8 bytes, big-endian, from 0, and has no gaps; the payload is msgpack,
  `[seconds since 1970, [event, ...], data parallel rank]`, each event an array with its name in front:
  `["BlockStored", hashes, parent hash or nil, tokens, tokens of a block, LoRA id (nil), medium, LoRA name (nil)]`,
  `["BlockRemoved", hashes, medium]`, `["AllBlocksCleared"]`. A block is a page of ours, its hash the page's name.
- ROUTER: a request ["", first number]; for each batch from there on ["", number, payload]; at last ["", -1, ""].

Overflow: when MAX_QUEUED batches wait for the thread a further one is dropped with its number: readers see a gap.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable

import msgspec
import zmq

from baton.common.clock import Clock, wall_offset_s
from baton.common.config import ClusterConfig
from baton.common.engine.loop import end_process
from baton.common.errors import ConfigError
from baton.common.ids import WorkerId
from baton.common.kv.events import AllRemoved, PageEvent, PagesRemoved, PagesStored
from baton.common.kv.pool import KvPool
from baton.common.log import EventLog
from baton.common.routing_config import MOST_WORKERS_PER_ROLE, KvEventsConfig

MAX_QUEUED = 4096
HIGH_WATER_BATCHES = 100_000
MAX_REQUEST_BYTES = 4096
"""Readers say no more than a topic, or a number. The sockets ask nobody who he is."""
MEDIUM = "GPU"
"""vLLM's word for the memory that attention reads, whatever it is made of."""
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)

_log = EventLog("baton.kv_publisher")
_encoder = msgspec.msgpack.Encoder()


class BlockStored(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """As vLLM names it and its fields."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """As vLLM names it and its fields."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """As vLLM names it."""


class EventBatch(msgspec.Struct, frozen=True, array_like=True):
    """As vLLM names it and its fields."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int


def encode_events(events: Iterable[PageEvent], page_size: int, wall_s: float) -> bytes:
    """The payload of one batch."""
    return _encoder.encode(EventBatch(wall_s, [_as_vllm_says(event, page_size) for event in events], 0))


def _as_vllm_says(event: PageEvent, page_size: int) -> BlockStored | BlockRemoved | AllBlocksCleared:
    match event:
        case PagesStored(parent, names, tokens):
            return BlockStored(names, parent or None, tokens.tolist(), page_size, None, MEDIUM, None)
        case PagesRemoved(names):
            return BlockRemoved(names, MEDIUM)
        case AllRemoved():
            return AllBlocksCleared()


def publishing_ports(worker: WorkerId, config: KvEventsConfig) -> tuple[int, int]:
    """Where a worker publishes and replays: another place for each seat of a host. Raises ConfigError."""
    role, _, number = worker.rpartition("-")
    place = int(number)
    if place >= MOST_WORKERS_PER_ROLE:
        reason = f"there are ports for {MOST_WORKERS_PER_ROLE} {role} workers, and this is {worker}"
        raise ConfigError("kv_events.publish", config.publish, reason)
    offset = 2 * place + (role == "decode")
    return config.port + offset, config.replay_port + offset


def publisher_of(pool: KvPool, worker: WorkerId, config: ClusterConfig, clock: Clock) -> KvPublisher | None:
    """None: nobody outside wants to hear, or the pool has nothing to say."""
    if pool.events is None or not config.kv_events.publish:
        return None
    offset_s = wall_offset_s(clock)
    return KvPublisher(
        worker,
        config.model.model,
        config.kv_events,
        pool.page_size,
        lambda: clock.now() + offset_s,
        end_process,
    )


class KvPublisher:
    """Sockets are bound here (ConfigError when they cannot be), the thread runs from `start` to `stop`. An exception on
    the thread is a bug and ends the process (`on_fatal`)."""

    def __init__(
        self,
        worker: WorkerId,
        model: str,
        config: KvEventsConfig,
        page_size: int,
        wall_s: Callable[[], float],
        on_fatal: Callable[[], None],
    ) -> None:
        self._page_size = page_size
        self._wall_s = wall_s
        self._on_fatal = on_fatal
        self._topic = config.topic.format(worker=worker, model=model).encode()
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_batches)
        self._queued: deque[tuple[int, float, list[PageEvent]]] = deque()
        self._number = 0
        self.dropped = 0
        self.refused = 0  # what came to the replay socket and was no request
        self._stopping = False
        self._context = zmq.Context()
        self._sockets = contextlib.ExitStack()
        try:
            self._open(config, publishing_ports(worker, config))
        except BaseException:
            self._close()
            raise
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)

    def _open(self, config: KvEventsConfig, ports: tuple[int, int]) -> None:
        self._pub = self._bound(zmq.PUB, config.host, ports[0], "port")
        self._replay = self._bound(zmq.ROUTER, config.host, ports[1], "replay_port")
        self._woken = self._sockets.enter_context(self._context.socket(zmq.PULL))
        self._woken.bind("inproc://woken")
        self._waker = self._sockets.enter_context(self._context.socket(zmq.PUSH))
        self._waker.connect("inproc://woken")

    def _bound(self, kind: int, host: str, port: int, setting: str) -> zmq.Socket[bytes]:
        socket = self._sockets.enter_context(self._context.socket(kind))
        socket.linger = 0
        socket.set_hwm(HIGH_WATER_BATCHES)
        socket.maxmsgsize = MAX_REQUEST_BYTES
        address = f"tcp://{host}:{port}"
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(f"kv_events.{setting}", port, f"{address}: {error.strerror}") from error
        _log.info("kv_events", what=setting, address=address)
        return socket

    # -------------------------------------------------------------------- the engine's thread, or before

    def start(self) -> None:
        self._thread.start()

    def publish(self, events: list[PageEvent]) -> None:
        """From one thread. Never waits."""
        number, self._number = self._number, self._number + 1
        if len(self._queued) >= MAX_QUEUED:
            self.dropped += 1
            return
        self._queued.append((number, self._wall_s(), events))
        with contextlib.suppress(zmq.Again):  # so many wake-ups wait already
            self._waker.send(b"", zmq.NOBLOCK)

    def stop(self, timeout_s: float) -> bool:
        """Closes everything. From the thread that publishes, or when that has ended. False: not in time."""
        self._stopping = True
        with contextlib.suppress(zmq.Again):
            self._waker.send(b"", zmq.NOBLOCK)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # ------------------------------------------------------------------------------------- its own thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._woken, zmq.POLLIN)
        poller.register(self._replay, zmq.POLLIN)
        try:
            while not self._stopping:
                ready = dict(poller.poll())
                if self._woken in ready:
                    self._woken.recv()
                self._send_queued()
                if self._replay in ready:
                    self._answer(self._replay.recv_multipart())
            self._close()
        except Exception:  # noqa: BLE001 - the thread's top frame
            _log.fatal("kv_publisher_failed")
            self._on_fatal()

    def _send_queued(self) -> None:
        while self._queued:
            number, wall_s, events = self._queued.popleft()
            payload = encode_events(events, self._page_size, wall_s)
            packed = number.to_bytes(8, "big")
            self._pub.send_multipart((self._topic, packed, payload))
            self._kept.append((packed, payload))

    def _answer(self, frames: list[bytes]) -> None:
        """Whatever else comes is counted, and not answered."""
        if len(frames) != 3 or len(frames[2]) != 8:
            self.refused += 1
            return
        reader, _, first = frames
        for packed, payload in self._kept:
            if packed >= first:  # big-endian: in the order of the numbers
                self._replay.send_multipart((reader, b"", packed, payload))
        self._replay.send_multipart((reader, b"", END_OF_REPLAY, b""))

    def _close(self) -> None:
        self._sockets.close()
        self._context.term()
