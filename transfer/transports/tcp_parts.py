"""What the `tcp` lane says on its connections: who proves what to whom, the frames, and the memory that bytes go from
and to. Owns no connection.

A connection begins with three messages of PROOF_BYTES: Hello (receiver: who I am, whom I mean, a nonce), Welcome
(source: who I am, a nonce) and Proof. Each carries an HMAC of itself and all that was said before, under what the two
processes share: so both ends know that the other one is who it says, now, and that they mean each other. What follows
are frames of FRAME_BYTES: ASK and DROP from the receiver; from the source DATA, as many bytes as it says, and END.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import struct
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate

import msgspec
import numpy as np

from baton.common.config import MAX_TCP_STREAMS
from baton.common.ids import Stamp
from baton.transfer.session.tickets import SecretWith
from baton.transfer.transports.base import Bytes, Rows
from baton.transfer.transports.seal import Seal

PROOF_BYTES = 512
ASK, DROP, DATA, END = range(1, 5)
WHOLE, SPOILED = 0, 1
BYTES_PER_CALL = 1 << 20
"""Most bytes, about, in one call of the kernel: it bounds the call's time, and each page of the list costs some."""

_VECTORS_PER_CALL = 1024
"""IOV_MAX."""
_FRAME = struct.Struct("<BxxxIQ")
FRAME_BYTES = _FRAME.size
_PADDING = memoryview(bytes(1 << 16))


class Gone(Exception):
    """The connection is over, or what came over it makes no sense."""


class NotListed(Gone):
    """It says that it is somebody who is no member; perhaps not yet."""


@dataclass(frozen=True, slots=True)
class TcpFrame:
    kind: int
    tag: int
    number: int
    """DATA: how many bytes follow. END: whether they were WHOLE or SPOILED."""

    def pack(self) -> bytes:
        return _FRAME.pack(self.kind, self.number, self.tag)

    @staticmethod
    def unpack(message: bytes) -> TcpFrame:
        kind, number, tag = _FRAME.unpack(message)
        return TcpFrame(kind, tag, number)


class Hello(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    stamp: Stamp
    meant_for: Stamp
    stream: int
    nonce: bytes


class Welcome(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    stamp: Stamp
    nonce: bytes


class Prover:
    """Makes and checks the first messages of a connection. Raises Gone for a peer that is no member, now."""

    def __init__(self, stamp: Stamp, secret_with: SecretWith) -> None:
        self._stamp = stamp
        self._secret_with = secret_with
        self._seal = Seal("tcp", PROOF_BYTES)

    def hello(self, peer: Stamp, stream: int) -> bytes:
        body = msgspec.msgpack.encode(Hello(self._stamp, peer, stream, secrets.token_bytes(16)))
        return self._seal.close(self._secret(peer), "hello", body)

    def read_hello(self, hello: bytes) -> Hello:
        """Raises Gone: the sender is not who it says, means somebody else, or asks for too much; NotListed."""
        with contextlib.suppress(msgspec.DecodeError):
            heard = msgspec.msgpack.decode(self._seal.claims(hello), type=Hello)
            proven = bool(self._seal.open(self._secret(heard.stamp), "hello", hello))
            if proven and heard.meant_for == self._stamp and 0 <= heard.stream < MAX_TCP_STREAMS:
                return heard
        raise Gone("a stranger called")

    def welcome(self, peer: Stamp, hello: bytes) -> bytes:
        body = msgspec.msgpack.encode(Welcome(self._stamp, secrets.token_bytes(16)))
        return self._seal.close(self._secret(peer), "welcome", body, hello)

    def proof(self, peer: Stamp, hello: bytes, welcome: bytes) -> bytes:
        """The receiver's answer to what `peer` seems to have said. Raises Gone: it was not `peer`."""
        secret = self._secret(peer)
        with contextlib.suppress(msgspec.DecodeError):
            heard = msgspec.msgpack.decode(self._seal.open(secret, "welcome", welcome, hello), type=Welcome)
            if heard.stamp == peer:
                return self._seal.close(secret, "proof", b"", hello + welcome)
        raise Gone("the peer could not prove who it is")

    def check_proof(self, peer: Stamp, hello: bytes, welcome: bytes, proof: bytes) -> None:
        """Raises Gone: the hello was a copy of another one."""
        if not hmac.compare_digest(proof, self._seal.close(self._secret(peer), "proof", b"", hello + welcome)):
            raise Gone("a stranger called")

    def _secret(self, peer: Stamp) -> bytes:
        secret = self._secret_with(peer)
        if secret is None:
            raise NotListed("a stranger called")
        return secret


class Vectors:
    """Pieces of memory, one after the other, and how far they have been sent or filled."""

    def __init__(self, pieces: list[memoryview]) -> None:
        self._pieces = pieces
        self._ends = list(accumulate(map(len, pieces)))
        self.done = 0

    @property
    def nbytes(self) -> int:
        return self._ends[-1] if self._ends else 0

    @property
    def left(self) -> int:
        return self.nbytes - self.done

    def next(self) -> list[memoryview]:
        """What the next call of the kernel shall have."""
        first = bisect_right(self._ends, self.done)
        last = min(bisect_right(self._ends, self.done + BYTES_PER_CALL) + 1, first + _VECTORS_PER_CALL)
        pieces = self._pieces[first:last]
        pieces[0] = pieces[0][self.done - self._ends[first] + len(pieces[0]) :]
        return pieces


class RegionMemory:
    """The pools of this process, as pieces of memory to send from and receive into."""

    def __init__(self, pool: Bytes) -> None:
        assert pool.flags.c_contiguous
        self._units, self._unit_bytes = pool.shape
        self._bytes = pool.reshape(-1).data

    def pieces(self, rows: Rows) -> list[memoryview]:
        """Of neighbouring rows one."""
        ids, row_bytes = rows.units.astype(np.int64), rows.row_bytes
        assert 0 <= rows.begin < rows.end <= self._unit_bytes, rows
        assert ids.min() >= 0, "a unit outside of the pool"
        assert ids.max() < self._units, "a unit outside of the pool"
        begins = ids * self._unit_bytes + rows.begin
        firsts = np.concatenate(([0], np.flatnonzero(np.diff(begins) != row_bytes) + 1))
        ends = begins[np.append(firsts[1:], len(begins)) - 1] + row_bytes
        return [self._bytes[begin:end] for begin, end in zip(begins[firsts].tolist(), ends.tolist(), strict=True)]


def region_out(tag: int, pieces: list[memoryview]) -> Vectors:
    """A region as it goes over the wire."""
    nbytes = sum(map(len, pieces))
    head, tail = TcpFrame(DATA, tag, nbytes), TcpFrame(END, tag, WHOLE)
    return Vectors([memoryview(head.pack()), *pieces, memoryview(tail.pack())])


def region_spoiled(tag: int, region: Vectors) -> Vectors:
    """The rest of a region that must not be read any more: as many bytes, and the news."""
    head = TcpFrame(DATA, tag, region.nbytes - 2 * FRAME_BYTES).pack()[region.done :]
    tail = TcpFrame(END, tag, SPOILED).pack()[-region.left :]
    padding = max(0, region.left - len(head) - len(tail))
    rest = [_PADDING[: min(len(_PADDING), padding - at)] for at in range(0, padding, len(_PADDING))]
    return Vectors([piece for piece in (memoryview(head), *rest, memoryview(tail)) if piece])


class Wire:
    """A connection that nobody waits for. Every method raises Gone when it is over."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._heard = bytearray()
        self._to_say = bytearray()
        self._wake_at = 1

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def quiet(self) -> bool:
        """Nothing that `say` was given waits to be sent."""
        return not self._to_say

    def fill(self, nbytes: int) -> None:
        """Reads what is there, at most `nbytes`."""
        try:
            data = self._socket.recv(nbytes)
        except BlockingIOError:
            return
        except OSError as error:
            raise Gone(f"connection lost: {error.strerror}") from error
        if not data:
            raise Gone("connection closed")
        self._heard += data

    def take(self, nbytes: int) -> bytes | None:
        """A message of `nbytes` of what was read; None: it has not come yet."""
        if len(self._heard) < nbytes:
            return None
        message = bytes(self._heard[:nbytes])
        del self._heard[:nbytes]
        return message

    def missing(self, nbytes: int) -> int:
        """How much of a message of `nbytes` has not been read."""
        return nbytes - len(self._heard)

    def say(self, message: bytes = b"") -> None:
        """Sends `message` behind what still waits, as far as that goes now."""
        self._to_say += message
        while self._to_say:
            try:
                sent = self._socket.send(self._to_say, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            except OSError as error:
                raise Gone(f"connection lost: {error.strerror}") from error
            del self._to_say[:sent]

    def send(self, region: Vectors) -> None:
        """Sends some of it, as far as that goes now."""
        try:
            region.done += self._socket.sendmsg(region.next(), (), socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return
        except OSError as error:
            raise Gone(f"connection lost: {error.strerror}") from error

    def wake_at(self, nbytes: int) -> None:
        """Nothing is to be read before so many bytes are there, or the connection is over."""
        if nbytes != self._wake_at:
            self._wake_at = nbytes
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)

    def receive(self, pieces: list[memoryview]) -> int:
        """How many bytes have come into `pieces`."""
        try:
            nbytes = self._socket.recvmsg_into(pieces)[0]
        except BlockingIOError:
            return 0
        except OSError as error:
            raise Gone(f"connection lost: {error.strerror}") from error
        if nbytes == 0:
            raise Gone("connection closed")
        return nbytes

    def check_connected(self) -> None:
        code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise Gone(f"cannot connect: {os.strerror(code)}")

    def close(self) -> None:
        self._socket.close()
