"""Copies rows of a pool: to rows of another one, or from and to staging memory. Compiled (csrc/copy_rows.cpp), with
numpy where there is no compiler: the same bytes, several times slower, and the log says so once.

Owns nothing. Never: checks ids, or touches a byte outside of the rows that it was given.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from baton.common.log import EventLog
from baton.common.native import BuildError, NativeLibrary, built
from baton.transfer.transports.base import Bytes, UnitIds

LIBRARY: Final = NativeLibrary(
    name="copy_rows",
    what="the page copies (once; about two seconds)",
    sources=Path(__file__).parent / "csrc",
    flags=("-O3", "-march=native", "-pthread"),
)
MOST_THREADS: Final = 4
"""More do not help: a few cores saturate a socket's memory."""
_log = EventLog("baton.transfer")

Copy = Callable[[Bytes, UnitIds | None, Bytes, UnitIds | None], None]


def copy_rows(target: Bytes, target_ids: UnitIds | None, source: Bytes, source_ids: UnitIds | None) -> None:
    """target[target_ids[i]] = source[source_ids[i]] for every i; without ids all rows, in order. Both are uint8
    [rows, bytes of one] with rows of one length; rows may lie apart, a row's bytes may not. The ids must be right."""
    _copy()(target, target_ids, source, source_ids)


def load_copies(say: Callable[[str], None]) -> None:
    """Compiles, if need be, what would else be compiled by the first copy, and so in the thread that heartbeats."""
    with contextlib.suppress(BuildError):  # told below
        built(LIBRARY, say)
    _copy()


def copy_rows_numpy(target: Bytes, target_ids: UnitIds | None, source: Bytes, source_ids: UnitIds | None) -> None:
    """The same without a compiler."""
    rows = source if source_ids is None else source[source_ids]
    target[slice(None) if target_ids is None else target_ids] = rows


@functools.cache
def _copy() -> Copy:
    try:
        path = built(LIBRARY, lambda message: _log.info("page_copies_build", message=message))
    except BuildError as error:
        _log.warning("page_copies_slow", reason=str(error), advice="install a C++ compiler (g++)")
        return copy_rows_numpy
    return compiled_copy(path)


def compiled_copy(path: Path) -> Copy:
    function = ctypes.CDLL(str(path)).baton_copy_rows  # releases the GIL while it copies
    side = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
    function.argtypes = [*side, *side, ctypes.c_int64, ctypes.c_int64, ctypes.c_int32]
    function.restype = None

    def copy(target: Bytes, target_ids: UnitIds | None, source: Bytes, source_ids: UnitIds | None) -> None:
        count, row_bytes = len(target if target_ids is None else target_ids), target.shape[1]
        assert count == len(source if source_ids is None else source_ids), "rows for rows"
        assert row_bytes == source.shape[1], f"rows of {source.shape[1]} bytes for rows of {row_bytes}"
        assert target.strides[1] == source.strides[1] == 1, "a row's bytes lie side by side"
        if count == 0:
            return
        function(*_side(target, target_ids), *_side(source, source_ids), count, row_bytes, _threads())

    return copy


def _side(rows: Bytes, ids: UnitIds | None) -> tuple[int, int | None, int]:
    if ids is None:
        return rows.ctypes.data, None, rows.strides[0]
    assert ids.flags.c_contiguous, "ids lie side by side"
    return rows.ctypes.data, ids.ctypes.data, rows.strides[0]


def _threads() -> int:
    """A thread per core that this one may run on: a worker with one core of its own gets none besides itself."""
    return min(MOST_THREADS, len(os.sched_getaffinity(0)))
