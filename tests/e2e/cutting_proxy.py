"""A TCP proxy that lets each connection carry so many bytes of answers, and then resets it."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterable, Iterator
from urllib.parse import urlsplit

PORTION_BYTES = 1 << 16
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends RST


class CuttingProxy:
    """`budgets`: of the connections, in their order; those behind them may carry everything."""

    def __init__(self, upstream_url: str, budgets: Iterable[int] = ()) -> None:
        self._budgets = iter(budgets)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: set[socket.socket] = set()
        self.cuts = 0
        self.lead_to(upstream_url)
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def lead_to(self, url: str) -> None:
        """New connections."""
        self._upstream = urlsplit(url).port

    def cut(self) -> None:
        """Everything that is open."""
        for one in list(self._open):
            self._reset(one)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            budget = next(self._budgets, None)
            try:
                server = socket.create_connection(("127.0.0.1", self._upstream))
            except OSError:
                self._reset(client)
                continue
            self._open |= {client, server}
            threading.Thread(target=self._pump, args=(client, server, None), daemon=True).start()
            threading.Thread(target=self._pump, args=(server, client, budget), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, budget: int | None) -> None:
        """Until one side ends, or so many bytes have passed."""
        with contextlib.suppress(OSError):
            while part := source.recv(PORTION_BYTES):
                if budget is not None:
                    if len(part) > budget:
                        sink.sendall(part[:budget])
                        self.cuts += 1
                        break
                    budget -= len(part)
                sink.sendall(part)
        self._reset(source)
        self._reset(sink)

    def _reset(self, one: socket.socket) -> None:
        self._open.discard(one)
        with contextlib.suppress(OSError):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            one.shutdown(socket.SHUT_RDWR)
        one.close()


@contextlib.contextmanager
def cutting(upstream_url: str, budgets: Iterable[int] = ()) -> Iterator[CuttingProxy]:
    proxy = CuttingProxy(upstream_url, budgets)
    try:
        yield proxy
    finally:
        proxy.close()
