"""What of the `ucx` lane lives on its own thread: two UCX workers with their endpoints, in an asyncio loop.

Owns: the links to sources, the receivers that have proven themselves, and every request that UCX holds. Never: a call
from another thread (`ucx.py` brings them here), or a one-sided access to memory of a peer.

Receiving is posted first, then asked for, so a region never waits inside UCX, and each tag is used once. A receive
that UCX holds cannot be taken back: to cancel one, the receiver sends DROP, and the source completes it with a region
of one byte, if it has not sent it yet. When that does not happen in time the endpoint is closed, which ends every
request on it. Until then the slot is UCX's.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field

import numpy as np

from baton.common.ids import Stamp
from baton.common.log import EventLog
from baton.transfer.session.tickets import SecretWith
from baton.transfer.transports.base import (
    TAG_TAKEN,
    Bytes,
    Ended,
    LinkDown,
    LinkUp,
    Received,
    Sent,
    TransportEvent,
)
from baton.transfer.transports.ucx_parts import DOOR_BYTES, Door, Endpoint, Hello, Ucxx, Welcome
from baton.transfer.transports.ucx_worker import UcxWorker, abort

CLOSE_TIMEOUT_S = 10.0
"""So long the end of the lane takes at most; half of it is for UCX to end its requests."""

_TAGS_PER_ASK = 8
_DROP_BIT = 1 << 63
_CANCEL_TIMEOUT_S = 2.0
_MAX_ASKED = 1 << 16
_HELLO_AGAIN_S = 0.5
"""A source that does not know this process as a member yet says nothing."""

_log = EventLog("baton.transfer")


@dataclass(slots=True, eq=False)
class _Link:
    """Towards a source, on the receiver's side."""

    peer: Stamp
    endpoint: Endpoint | None = None
    ask_tag: int = 0  # 0: not welcomed yet
    ops: dict[int, int] = field(default_factory=dict)  # op -> tag
    cancelled: set[int] = field(default_factory=set)
    outbox: list[int] = field(default_factory=list)
    flushing: bool = False


@dataclass(slots=True, eq=False)
class _Caller:
    """A proven receiver, on the source's side."""

    peer: Stamp
    endpoint: Endpoint
    ask_tag: int
    asked: dict[int, None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Ready:
    op: int
    payload: Bytes


class UcxLoop:
    """To be made in a running loop, on the thread of which all of it is called. `report` and `crash` are called there,
    too. Raises `ucxx.error` when UCX does not start."""

    def __init__(
        self,
        ucxx: Ucxx,
        stamp: Stamp,
        secret_with: SecretWith,
        report: Callable[[TransportEvent], None],
        crash: Callable[[BaseException | None], None],
    ) -> None:
        self._ucxx = ucxx
        self._stamp = stamp
        self._door = Door(secret_with)
        self._report = report
        self._crash = crash
        self._receiving = UcxWorker(ucxx)
        self._serving = UcxWorker(ucxx)
        self._loop = asyncio.get_running_loop()
        self._links: dict[Stamp, _Link] = {}
        self._callers: dict[Stamp, _Caller] = {}
        self._ready: dict[tuple[Stamp, int], _Ready] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = asyncio.Event()
        self.door = _new_tag()
        self.stray = 0  # knocks at the door that were not answered; read on another thread
        self.worker_address = self._serving.address
        self._start(self._answer_door())

    async def run(self) -> None:
        """Until `close`: then ends every request and waits for it."""
        await self._closing.wait()
        for link in list(self._links.values()):
            self._break(link, "closed", quietly=True)
        for caller in list(self._callers.values()):
            self._forget_caller(caller)
        for ready in self._ready.values():
            self._report(Ended(ready.op, "closed", peer_lost=False))
        self._ready.clear()
        await self._leave_door()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_TIMEOUT_S / 2)
        self._receiving.stop()
        self._serving.stop()

    # ------------------------------------------------------------------------ what the lane is asked for

    def close(self) -> None:
        self._closing.set()

    def open(self, peer: Stamp, worker: bytes, door: int) -> None:
        self.close_link(peer)
        link = _Link(peer)
        self._links[peer] = link
        self._start(self._connect(link, worker, door))

    def close_link(self, peer: Stamp) -> None:
        link = self._links.get(peer)
        if link is not None:
            self._break(link, "link closed", quietly=True)

    def shut_out(self, peer: Stamp) -> None:
        self.close_link(peer)
        caller = self._callers.get(peer)
        if caller is not None:
            self._forget_caller(caller)
        for key in [key for key in self._ready if key[0] == peer]:
            self._report(Ended(self._ready.pop(key).op, "shut out", peer_lost=False))

    def receive(self, op: int, peer: Stamp, tag: int, slot: Bytes) -> None:
        link = self._links.get(peer)
        if link is None or not link.ask_tag or self._closing.is_set():
            self._report(Ended(op, "the link is not open", peer_lost=False))
            return
        link.ops[op] = tag
        self._start(self._receive(link, op, tag, slot))

    def send(self, op: int, peer: Stamp, tag: int, payload: Bytes) -> None:
        caller = self._callers.get(peer)
        if caller is not None and tag in caller.asked:
            del caller.asked[tag]
            self._start(self._send(caller, op, tag, payload))
        elif (peer, tag) in self._ready:
            self._report(Ended(op, TAG_TAKEN, peer_lost=False))
        else:
            self._ready[peer, tag] = _Ready(op, payload)

    def cancel(self, op: int) -> None:
        for link in self._links.values():
            if op in link.ops and op not in link.cancelled:
                link.cancelled.add(op)
                self._ask(link, link.ops[op] | _DROP_BIT)
                self._loop.call_later(_CANCEL_TIMEOUT_S, self._break_if_stuck, link, op)
        for key in [key for key, ready in self._ready.items() if ready.op == op]:
            del self._ready[key]
            self._report(Ended(op, "cancelled", peer_lost=False))

    # ---------------------------------------------------------------------------------------- receiver

    async def _connect(self, link: _Link, worker: bytes, door: int) -> None:
        nonce, reply_tag = secrets.token_bytes(16), _new_tag()
        reply = np.zeros(DOOR_BYTES, dtype=np.uint8)
        try:
            number = self._receiving.made(link.peer)
            endpoint = await self._receiving.connect(link.peer, worker)
            if self._links.get(link.peer) is not link:  # given up meanwhile
                abort(endpoint)
                return
            link.endpoint = endpoint
            said = Hello(self._stamp, link.peer.epoch, self._receiving.address, number, reply_tag, nonce)
            hello = self._door.close(link.peer, said)
            posted = asyncio.ensure_future(self._receiving.receive(endpoint, reply, reply_tag))
            while not posted.done() and self._links.get(link.peer) is link:
                await self._receiving.send(endpoint, hello, door)
                await asyncio.wait({posted}, timeout=_HELLO_AGAIN_S)
            await posted
        except self._ucxx.error as error:
            self._break(link, f"cannot connect: {error}")
            return
        welcome = self._door.open(reply, Welcome)
        if welcome is None or welcome.stamp != link.peer or welcome.nonce != nonce:
            self._break(link, "the peer could not prove who it is")
        elif self._links.get(link.peer) is link:
            link.ask_tag = welcome.ask_tag
            self._report(LinkUp(link.peer))
            await self._watch(link)

    async def _watch(self, link: _Link) -> None:
        """A receive that nobody will send for ends when the peer does."""
        assert link.endpoint is not None
        try:
            await self._receiving.receive(link.endpoint, np.zeros(8, dtype=np.uint8), _new_tag())
        except self._ucxx.error as error:
            self._break(link, f"connection lost: {error}")

    async def _receive(self, link: _Link, op: int, tag: int, slot: Bytes) -> None:
        assert link.endpoint is not None
        posted = asyncio.ensure_future(self._receiving.receive(link.endpoint, slot, tag))
        await asyncio.sleep(0)  # posted now; only then the source may send
        self._ask(link, tag)
        try:
            await posted
        except self._ucxx.error as error:
            lost = link.endpoint.closed or self._links.get(link.peer) is not link
            self._report(Ended(op, str(error), peer_lost=lost))
        else:
            cancelled = op in link.cancelled
            self._report(Ended(op, "cancelled", peer_lost=False) if cancelled else Received(op, slot))
        del link.ops[op]
        link.cancelled.discard(op)

    def _ask(self, link: _Link, entry: int) -> None:
        link.outbox.append(entry)
        if not link.flushing:
            link.flushing = True
            self._start(self._flush(link))

    async def _flush(self, link: _Link) -> None:
        """Asks and drops in order; those that come while one message leaves go together in the next."""
        assert link.endpoint is not None
        try:
            while link.outbox and self._links.get(link.peer) is link:
                message = np.zeros(_TAGS_PER_ASK, dtype=np.uint64)
                entries, link.outbox = link.outbox[:_TAGS_PER_ASK], link.outbox[_TAGS_PER_ASK:]
                message[: len(entries)] = entries
                await self._receiving.send(link.endpoint, message.view(np.uint8), link.ask_tag)
        except self._ucxx.error as error:
            self._break(link, f"cannot ask: {error}")
        finally:
            link.flushing = False

    def _break_if_stuck(self, link: _Link, op: int) -> None:
        if op in link.ops:
            self._break(link, "a cancelled region did not end")

    def _break(self, link: _Link, reason: str, quietly: bool = False) -> None:
        """Closes the endpoint: every request on it ends, and is reported by whoever waits for it."""
        if self._links.get(link.peer) is not link:
            return
        del self._links[link.peer]
        if link.endpoint is not None:
            abort(link.endpoint)
        if not quietly:
            self._report(LinkDown(link.peer, reason))

    # ------------------------------------------------------------------------------------------ source

    async def _answer_door(self) -> None:
        """Reads one fixed-size message after the other; without the right seal nothing follows from it."""
        sealed = np.zeros(DOOR_BYTES, dtype=np.uint8)
        while not self._closing.is_set():
            sealed[:] = 0  # a short message must not be read with the end of the one before
            try:
                await self._serving.hear(sealed, self.door)
            except self._ucxx.error as error:
                self.stray += 1
                _log.seldom("ucx_door", error=str(error))  # a message that was too long
                continue
            if self._closing.is_set():
                return
            hello = self._door.open(sealed, Hello)
            if hello is not None and hello.meant_for == self._stamp.epoch:
                self._start(self._welcome(hello))
            else:
                self.stray += 1
                _log.seldom("ucx_stranger")

    async def _leave_door(self) -> None:
        """UCX does not give back a receive of the worker itself: knock, so that it ends."""
        try:
            endpoint = await self._serving.to_itself()
        except self._ucxx.error as error:  # not even itself: the network that it was told to use is gone
            _log.warning("ucx_door", error=str(error))
            return
        await self._serving.send(endpoint, np.zeros(1, dtype=np.uint8), self.door)
        abort(endpoint)

    async def _welcome(self, hello: Hello) -> None:
        if hello.number < self._serving.made(hello.stamp):
            return  # it was said again before the welcome had come
        try:
            old = self._callers.get(hello.stamp)
            if old is not None:
                _log.info("ucx_opened_again", peer=hello.stamp.worker, number=hello.number)
                self._forget_caller(old)
            endpoint = await self._serving.pair(hello.stamp, hello.worker, hello.number)
            if endpoint is None:
                return  # it will say so again
            caller = _Caller(hello.stamp, endpoint, _new_tag())
            self._callers[hello.stamp] = caller
            self._start(self._hear_asks(caller))
            welcome = self._door.close(hello.stamp, Welcome(self._stamp, hello.nonce, caller.ask_tag))
            await self._serving.send(endpoint, welcome, hello.reply_tag)
        except self._ucxx.error as error:
            _log.seldom("ucx_welcome", peer=hello.stamp.worker, error=str(error))

    async def _hear_asks(self, caller: _Caller) -> None:
        message = np.zeros(_TAGS_PER_ASK, dtype=np.uint64)
        try:
            while True:
                await self._serving.receive(caller.endpoint, message.view(np.uint8), caller.ask_tag)
                for entry in message.tolist():
                    self._on_ask(caller, entry)
        except self._ucxx.error:
            self._forget_caller(caller)

    def _on_ask(self, caller: _Caller, entry: int) -> None:
        tag = entry & ~_DROP_BIT
        if not tag:
            return
        if entry & _DROP_BIT:
            if tag in caller.asked:  # else it has been sent
                del caller.asked[tag]
                self._start(self._send(caller, None, tag, np.zeros(1, dtype=np.uint8)))
        elif (caller.peer, tag) in self._ready:
            ready = self._ready.pop((caller.peer, tag))
            self._start(self._send(caller, ready.op, tag, ready.payload))
        else:
            caller.asked[tag] = None
            if len(caller.asked) > _MAX_ASKED:
                self._forget_caller(caller)

    async def _send(self, caller: _Caller, op: int | None, tag: int, payload: Bytes) -> None:
        """`op` None: completes a receive that its owner does not want any more."""
        try:
            await self._serving.send(caller.endpoint, payload, tag)
        except self._ucxx.error as error:
            if op is not None:
                self._report(Ended(op, str(error), peer_lost=True))
        else:
            if op is not None:
                self._report(Sent(op))

    def _forget_caller(self, caller: _Caller) -> None:
        if self._callers.get(caller.peer) is caller:
            del self._callers[caller.peer]
            abort(caller.endpoint)

    # -------------------------------------------------------------------------------------------- both

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._crash(task.exception())


def _new_tag() -> int:
    """Unguessable, and never the tag of a region: those are below 2^63."""
    return secrets.randbits(62) | 1 << 63
