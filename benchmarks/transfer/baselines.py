"""What nothing can beat: memcpy of the same scattered pages inside one process, and a bare ZMQ round trip between two.

Owns: the compiled copy loop (libc's memcpy, page by page; no interpreter in between) and its two pools.
"""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import zmq

from benchmarks.transfer import pages
from benchmarks.transfer.children import Child, Move
from benchmarks.transfer.control import Meter
from benchmarks.transfer.zmq_end import QUIT

_SOURCE = """
#include <string.h>
#include <stdint.h>
void copy_pages(char *to, const char *from, const int32_t *ours, const int32_t *theirs, long count, long bytes) {
    for (long i = 0; i < count; i++)
        memcpy(to + ours[i] * bytes, from + theirs[i] * bytes, bytes);
}
"""


class Memcpy:
    """Used like a `Pair`. `threads` share the pages of each hand-off."""

    def __init__(self, page_bytes: int, pool_bytes: int) -> None:
        self._copy = _compiled()
        self._page_bytes = page_bytes
        self._source, self._target = (pages.new_pool(pool_bytes, page_bytes) for _ in range(2))
        pages.fill(self._source)
        self._ids = {side: pages.scattered(pool_bytes, page_bytes, side) for side in ("source", "target")}

    def move(self, count: int, first: int, threads: int) -> Move:
        ours, theirs = (pages.stretch(self._ids[side], first, count) for side in ("target", "source"))
        cuts = np.linspace(0, count, threads + 1).astype(int).tolist()
        meter = Meter()
        started = time.perf_counter()
        workers = [
            threading.Thread(target=self._copy_part, args=(ours[begin:end], theirs[begin:end]))
            for begin, end in itertools.pairwise(cuts[1:])
        ]
        for worker in workers:
            worker.start()
        self._copy_part(ours[: cuts[1]], theirs[: cuts[1]])
        for worker in workers:
            worker.join()
        return Move(time.perf_counter() - started, meter.read())

    def check(self, count: int) -> str:
        self._target[:] = 0
        self.move(count, 0, 2)
        ours, theirs = (pages.stretch(self._ids[side], 0, count) for side in ("target", "source"))
        wrong, stray = pages.wrong_pages(self._target, ours, theirs), pages.stray_pages(self._target, ours)
        return f"{wrong} of {count} pages are wrong, {stray} others were written" if wrong or stray else ""

    def _copy_part(self, ours: pages.Ids, theirs: pages.Ids) -> None:
        self._copy(
            self._target.ctypes.data,
            self._source.ctypes.data,
            ours.ctypes.data,
            theirs.ctypes.data,
            len(ours),
            self._page_bytes,
        )


def _compiled() -> Callable[..., None]:
    """The loop; needs a C compiler, as Baton's own kernels do. Loaded libraries outlive their file."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise SystemExit("bench-transfer needs a C compiler (cc) for its memcpy baseline")
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "copy.c", Path(folder) / "copy.so"
        source.write_text(_SOURCE)
        subprocess.run([compiler, "-O3", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
        function = ctypes.CDLL(str(library)).copy_pages
    function.restype = None
    function.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_long] * 2  # releases the interpreter while it copies
    return function


class ZmqRoundTrip:
    """DEALER here, ROUTER in a child, 64 bytes there and back."""

    def __init__(self, address: str) -> None:
        self._child = Child("zmq_end", {"address": address})
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.connect(self._child.receive()["hello"])
        for _ in range(100):
            self.once()

    def once(self) -> float:
        """Seconds."""
        started = time.perf_counter()
        self._socket.send(bytes(64))
        self._socket.recv()
        return time.perf_counter() - started

    def close(self) -> None:
        self._socket.send(QUIT)
        self._child.close()
        self._socket.close(0)
        self._context.term()
