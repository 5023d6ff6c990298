"""A member at the `ucx` lane of a source, who knocks with anything. Its own address is a good one: UCX ends the process
that is given another (SECURITY.md)."""

from __future__ import annotations

import asyncio
import random
import secrets

import numpy as np

from baton.common.ids import Stamp
from baton.common.messages import LaneAddress
from baton.transfer.transports.ucx import UcxTransport
from baton.transfer.transports.ucx_parts import DOOR_BYTES, Bytes, Door, Hello

MOST_UNSAID = 16
SAID_WITHIN_S = 0.5


class _Alone:
    """Nobody waits for its events."""

    def register(self, source: object) -> None:
        pass

    unregister = register


class UcxCaller:
    in_a_row = 12

    def __init__(self, dice: random.Random, address: LaneAddress, secret: bytes, stamp: Stamp, meant: Stamp) -> None:
        self._dice, self._stamp, self._meant = dice, stamp, meant
        self._lane = UcxTransport(stamp, _Alone(), "127.0.0.1", lambda peer: secret)
        self._door = Door(lambda peer: secret)
        self._tag = int(address.address["door"])
        self._worker = bytes.fromhex(str(address.address["worker"]))
        self._words_out: asyncio.Queue[Bytes] = asyncio.Queue()
        asyncio.run_coroutine_threadsafe(self._say_all(), self._lane._loop)
        self.tags: list[int] = [0]  # it never gets as far as to ask
        self.sent = 0

    def ask(self) -> None:
        """Waits for nobody: who was shown the door may need seconds for another try."""
        if self._words_out.qsize() < MOST_UNSAID:
            self._lane._loop.call_soon_threadsafe(self._words_out.put_nowait, self._words())

    async def _say_all(self) -> None:
        ucx, endpoint = self._lane._ucx, None
        while True:
            words = await self._words_out.get()
            try:
                if endpoint is None:
                    endpoint = await ucx._receiving.connect(self._meant, self._worker)
                await asyncio.wait_for(ucx._receiving.send(endpoint, words, self._tag), SAID_WITHIN_S)
                self.sent += 1
            except (ucx._ucxx.error, TimeoutError):  # shown the door, or forgotten there
                endpoint = None

    def close(self) -> None:
        self._lane.close()

    def _words(self) -> Bytes:
        dice, roll = self._dice, self._dice.random()
        if roll < 0.4:
            nbytes = dice.choice((1, 40, DOOR_BYTES - 1, DOOR_BYTES, DOOR_BYTES + 1, 5000))
            return np.frombuffer(dice.randbytes(nbytes), dtype=np.uint8).copy()
        own = self._lane._ucx._receiving.address
        number = dice.choice((0, 1, self._lane._ucx._receiving.made(self._meant), 1 << 40))
        epoch = self._meant.epoch if dice.random() < 0.5 else dice.getrandbits(62)
        tag = dice.choice((0, 1, (1 << 64) - 1, dice.getrandbits(62)))
        sealed = self._door.close(self._meant, Hello(self._stamp, epoch, own, number, tag, secrets.token_bytes(16)))
        if roll < 0.98:
            sealed[dice.randrange(len(sealed) if roll < 0.6 else 40)] ^= dice.randrange(1, 256)
        return sealed
