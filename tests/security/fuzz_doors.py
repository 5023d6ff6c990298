"""What comes to a listening socket that is not the mesh of a member: bytes of strangers who have no key, lanes of peers
who have one and are mad, and readers of KV events. Each attacker sends one piece at a time and remembers nothing
that would make two runs of one seed differ.
"""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading

import msgspec
import zmq

from baton.common.ids import Epoch, Stamp
from baton.transfer.keys import KeyPair
from baton.transfer.mesh import bind_to, secure_client, secure_server
from baton.transfer.session.tickets import SecretWith
from baton.transfer.transports.tcp_parts import ASK, DATA, DROP, END, FRAME_BYTES, PROOF_BYTES, Gone, Prover, TcpFrame

_GREETING = b"\xff" + bytes(8) + b"\x7f\x03"
_MECHANISMS = (b"NULL", b"PLAIN", b"CURVE", b"GSSAPI", b"", b"x" * 20)
_GONE = (ConnectionError, TimeoutError, BrokenPipeError)
MOST_OPEN = 24


def dial(port: int) -> socket.socket:
    """Whose end leaves nothing behind, not even a port in TIME_WAIT."""
    raw = socket.create_connection(("127.0.0.1", port), timeout=5.0)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return raw


class Strangers:
    """Connections without a key, to any port; some stay open for a while, as if they had something to add."""

    def __init__(self, dice: random.Random, ports: tuple[int, ...]) -> None:
        self._dice = dice
        self._ports = ports
        self._open: list[socket.socket] = []
        self.sent = 0

    def knock(self) -> None:
        """One connection, and a few pieces on it."""
        dice = self._dice
        try:
            raw = dial(dice.choice(self._ports))
        except OSError:
            return
        with contextlib.suppress(OSError):
            for piece in self._pieces():
                raw.sendall(piece)
                self.sent += 1
        self._open.append(raw)
        if len(self._open) > MOST_OPEN:
            self._open.pop(dice.randrange(MOST_OPEN)).close()

    def _pieces(self) -> list[bytes]:
        dice = self._dice
        roll = dice.random()
        if roll < 0.3:
            return [dice.randbytes(dice.choice((1, 20, 512, 2000))) for _ in range(dice.choice((1, 3)))]
        if roll < 0.4:
            return [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01" + dice.randbytes(200)]
        greeting = _GREETING + dice.choice(_MECHANISMS).ljust(20, b"\0") + dice.choice((b"\0", b"\1")) + bytes(31)
        pieces = [greeting[: dice.choice((1, 10, 12, 64, 64, 64, 64))]]
        for _ in range(dice.randrange(1, 5)):
            pieces.append(self._command())
        return pieces

    def _command(self) -> bytes:
        """Of ZMTP: a step of a handshake, or a message before there was one."""
        dice = self._dice
        name = dice.choice((b"HELLO", b"INITIATE", b"READY", b"ERROR", b"MESSAGE", b"WELCOME", b"PING", b"x" * 255))
        body = bytes([len(name)]) + name + dice.randbytes(dice.choice((0, 8, 194, 400)))
        if name == b"HELLO" and dice.random() < 0.7:  # well made, but of nobody
            body = b"\x05HELLO\x01\x00" + bytes(72) + dice.randbytes(32 + 8 + 80)
        flags = dice.choice((0, 1, 2, 4, 4, 4, 6, 0xFF))
        if flags & 2:
            return bytes([flags]) + dice.choice((len(body), 1 << 62)).to_bytes(8, "big") + body
        return bytes([flags, len(body) % 256]) + body

    def close(self) -> None:
        for raw in self._open:
            raw.close()


class WrongKeys:
    """Real ZMQ with good keys that are on no list, with none, and with a password. `doors`: (port, its public key)."""

    def __init__(self, dice: random.Random, doors: tuple[tuple[int, str], ...]) -> None:
        self._dice, self._doors = dice, doors
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._open: list[zmq.Socket[bytes]] = []
        self.sent = 0

    def knock(self) -> None:
        dice = self._dice
        dealer = self._context.socket(dice.choice((zmq.DEALER, zmq.REQ, zmq.SUB)))
        dealer.linger = 0
        dealer.sndtimeo = 100
        dealer.set_hwm(100)
        port, server = dice.choice(self._doors)
        match dice.randrange(3):
            case 0:
                secure_client(dealer, KeyPair.generate(), server)
            case 1:
                dealer.plain_username, dealer.plain_password = b"baton", b"baton"
            case _:
                pass
        dealer.connect(f"tcp://127.0.0.1:{port}")
        with contextlib.suppress(zmq.ZMQError):
            for _ in range(3):
                dealer.send(dice.randbytes(50), zmq.NOBLOCK)
                self.sent += 1
        self._open.append(dealer)
        if len(self._open) > MOST_OPEN:
            self._open.pop(dice.randrange(MOST_OPEN)).close()

    def close(self) -> None:
        self._context.destroy(linger=0)


class ZmqLaneCaller:
    """A member at the `zmq` lane of a source, who asks for anything."""

    in_a_row = 110

    def __init__(self, dice: random.Random, port: int, server: str, keys: KeyPair, stamp: Stamp, meant: Epoch) -> None:
        self._dice, self._stamp, self._meant = dice, stamp, meant
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        secure_client(self._socket, keys, server)
        self._socket.connect(f"tcp://127.0.0.1:{port}")
        self.tags: list[int] = [0]
        self.sent = 0

    def ask(self) -> None:
        dice = self._dice
        epoch = self._meant if dice.random() < 0.9 else dice.getrandbits(62)
        hello = msgspec.msgpack.encode((self._stamp, epoch))
        tag = (dice.choice(self.tags) + dice.choice((0, 0, 1))) % (1 << 64)
        packed = tag.to_bytes(8, "little")
        parts = dice.choice(
            (
                [b"H", hello],
                [b"H", hello[:-2]],
                [b"A", packed],
                [b"A", packed],
                [b"X", packed],
                [b"A", dice.randbytes(8)],
                [b"A", packed[:7]],
                [b"A", packed, packed],
                [b"W", hello],
                [b"D", packed, dice.randbytes(100)],
                [dice.randbytes(5)],
                [b""] * dice.choice((1, 3, 100)),
                [b"H", b"\x91" * 2000],
                [b"H" * 4000],
            )
        )
        if not self._socket.poll(20_000, zmq.POLLOUT):
            raise AssertionError("a zmq lane has not read for 20 s")
        self._socket.send_multipart(parts)
        self.sent += 1
        while self._socket.poll(0):
            self._socket.recv_multipart()

    def close(self) -> None:
        self._context.destroy(linger=0)


class TcpLaneCaller:
    """A member at the `tcp` lane of a source: proves itself, more or less, and then asks for anything."""

    in_a_row = 110

    def __init__(self, dice: random.Random, port: int, secret: bytes, stamp: Stamp, meant: Stamp) -> None:
        self._dice, self._port, self._stamp, self._meant = dice, port, stamp, meant
        self._prover = Prover(stamp, lambda peer: secret)
        self._raw: socket.socket | None = None
        self.tags: list[int] = [0]
        self.sent = 0

    def ask(self) -> None:
        dice = self._dice
        try:
            if self._raw is None:
                self._raw = self._proven()
                return
            kind = dice.choice((ASK, ASK, ASK, DROP, DATA, END, 0, 250))
            tag = dice.choice(self.tags) + dice.choice((0, 0, 1, 1 << 60))
            frame = TcpFrame(kind, tag % (1 << 64), dice.choice((0, 1, 1 << 31))).pack()
            self._raw.sendall(frame if dice.random() < 0.95 else dice.randbytes(dice.choice((1, 15, 40))))
            self.sent += 1
            self._raw.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while self._raw.recv(1 << 16):
                    pass
                raise ConnectionError
            self._raw.settimeout(5.0)
        except OSError:
            self.close()

    def _proven(self) -> socket.socket | None:
        dice = self._dice
        raw = dial(self._port)
        hello = self._prover.hello(self._meant, dice.choice((0, 0, 0, 1, 7, 1 << 40)))
        if dice.random() < 0.2:
            hello = bytes(dice.randrange(256) if dice.random() < 0.01 else byte for byte in hello)
        raw.settimeout(0.5)  # who says that it is somebody else is not sent away at once: that one may be on its way
        raw.sendall(hello)
        self.sent += 1
        welcome = b""
        while len(welcome) < PROOF_BYTES:
            more = raw.recv(PROOF_BYTES - len(welcome))
            if not more:
                raw.close()
                return None
            welcome += more
        with contextlib.suppress(Gone):
            proof = self._prover.proof(self._meant, hello, welcome)
            raw.sendall(proof if dice.random() < 0.9 else proof[:-1] + b"\1")
            self.sent += 1
        return raw

    def close(self) -> None:
        if self._raw is not None:
            self._raw.close()
            self._raw = None


class MadTcpSource:
    """A `tcp` lane's listener that proves itself to whoever calls, and answers each ASK with something."""

    def __init__(self, dice: random.Random, secret_with: SecretWith, stamp: Stamp) -> None:
        self._dice = dice
        self._prover = Prover(stamp, secret_with)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.sent = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                raw, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(raw,), daemon=True).start()

    def _serve(self, raw: socket.socket) -> None:
        raw.settimeout(60.0)
        with raw, contextlib.suppress(OSError, Gone):
            hello = _exactly(raw, PROOF_BYTES)
            welcome = self._prover.welcome(self._prover.read_hello(hello).stamp, hello)
            raw.sendall(welcome if self._dice.random() < 0.9 else welcome[::-1])
            _exactly(raw, PROOF_BYTES)
            while True:
                asked = TcpFrame.unpack(_exactly(raw, FRAME_BYTES))
                raw.sendall(self._answer(asked))
                self.sent += 1

    def _answer(self, asked: TcpFrame) -> bytes:
        dice = self._dice
        nbytes = dice.choice((0, 100, 4096, 65536))
        tag = asked.tag if dice.random() < 0.7 else dice.getrandbits(60)
        data = TcpFrame(DATA, tag, dice.choice((nbytes, (1 << 32) - 1))).pack() + dice.randbytes(nbytes)
        end = TcpFrame(dice.choice((END, END, DATA, 99)), tag, dice.choice((0, 1, 7))).pack()
        return dice.choice((data + end, data, end, dice.randbytes(30)))

    def close(self) -> None:
        self._listener.close()


def _exactly(raw: socket.socket, nbytes: int) -> bytes:
    got = b""
    while len(got) < nbytes:
        more = raw.recv(nbytes - len(got))
        if not more:
            raise ConnectionError
        got += more
    return got


class MadZmqSource:
    """A `zmq` lane's ROUTER that lets every member in, and answers each ASK with something."""

    def __init__(self, dice: random.Random, keys: KeyPair, stamp: Stamp) -> None:
        self._dice, self._stamp = dice, stamp
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        secure_server(self._socket, keys)
        self.address = bind_to(self._socket, "127.0.0.1")
        self.sent = 0

    def close(self) -> None:
        self._context.destroy(linger=0)

    def serve(self) -> None:
        dice = self._dice
        for _ in range(64):
            if not self._socket.poll(0):
                return
            caller, *parts = self._socket.recv_multipart()
            answers: list[list[bytes]] = []
            if parts[:1] == [b"H"] and len(parts) == 2:
                who, _ = msgspec.msgpack.decode(parts[1], type=tuple[Stamp, int])
                welcome = msgspec.msgpack.encode((self._stamp, who.epoch))
                answers = [[b"W", welcome]] if dice.random() < 0.9 else [[b"W", welcome[:-1]], [b"W"], [b"W", welcome]]
            elif parts[:1] == [b"A"]:
                tag = parts[1] if dice.random() < 0.7 else dice.randbytes(dice.choice((0, 8, 9)))
                data = dice.randbytes(dice.choice((0, 100, 4096, 65536)))
                answers = [
                    dice.choice(([b"D", tag, data], [b"D", tag], [b"D"], [b"", tag, data], [b"D", tag, data, data]))
                ]
            for answer in answers:
                with contextlib.suppress(zmq.ZMQError):
                    self._socket.send_multipart([caller, *answer], zmq.NOBLOCK)
                    self.sent += 1


class EventReaders:
    """Whoever reaches the ports of KV events: asks for replays that make no sense, and subscribes to anything."""

    def __init__(self, dice: random.Random, ports: tuple[tuple[int, int], ...]) -> None:
        self._dice = dice
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._askers, self._readers = [], []
        for pub, replay in ports:
            asker = self._context.socket(zmq.DEALER)
            reader = self._context.socket(zmq.SUB)
            for one, port in ((asker, replay), (reader, pub)):
                one.linger = 0
                one.set_hwm(1000)
                one.connect(f"tcp://127.0.0.1:{port}")
            self._askers.append(asker)
            self._readers.append(reader)
        self.sent = 0

    def ask(self) -> None:
        dice = self._dice
        if dice.random() < 0.3:
            reader, topic = dice.choice(self._readers), dice.randbytes(dice.choice((0, 1, 3, 200)))
            reader.subscribe(topic)
            reader.unsubscribe(topic)
            self.sent += 2
            return
        asker = dice.choice(self._askers)
        number = dice.choice((b"\xff" * 8, b"\xff" * 8, dice.randbytes(8), b"", b"1", dice.randbytes(300)))
        if dice.random() < 0.01:
            number = bytes(8)  # all that is kept
        parts = dice.choice(([b"", number], [b"", number], [number], [b"", number, b""], [b""] * 50))
        if asker.poll(20_000, zmq.POLLOUT):
            asker.send_multipart(parts)
            self.sent += 1
        while asker.poll(0):
            asker.recv_multipart()

    def close(self) -> None:
        self._context.destroy(linger=0)
