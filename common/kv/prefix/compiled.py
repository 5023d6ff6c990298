"""The compiled core of the prefix tree (csrc/): how it is built, loaded and called. Knows no lease, match or token: it
passes what `radix_cpp.RadixCacheCpp` says to the C++ functions and takes their answers apart.

Owns: the foreign signatures, the life of a compiled tree, and what the log says of the build or the lack of it.
Never: touches memory that C++ owns after the next call, or after the tree is gone.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Callable, Sequence
from ctypes import c_char_p, c_int64, c_void_p
from pathlib import Path
from typing import ClassVar, Final, NoReturn, final

import numpy as np
import numpy.typing as npt

from baton.common.kv.errors import InvariantViolation
from baton.common.kv.layout import KvLayout
from baton.common.kv.prefix.interface import I32, NO_IDS
from baton.common.log import EventLog
from baton.common.native import BuildError, NativeLibrary, built

LIBRARY: Final = NativeLibrary(
    name="radix_cache",
    what="the prefix tree (once; about five seconds)",
    sources=Path(__file__).parent / "csrc",
    flags=("-O2",),
)
CHEAP_COPY_BYTES: Final = 64 << 10
_log = EventLog("baton.kv")


class _Counts(ctypes.Structure):
    """`Counts` in csrc/node.h, field for field."""

    _fields_: ClassVar = [(name, c_int64) for name in ("evictable", "locked", "evicted_total", "queued")]
    evictable: int
    locked: int
    evicted_total: int
    queued: int


class Books(ctypes.Structure):
    """`Books` in csrc/page_tree.h, field for field."""

    _fields_: ClassVar = [
        ("full", _Counts),
        ("swa", _Counts),
        ("state", _Counts),
        *((name, c_int64) for name in ("nodes", "leases", "work")),
    ]
    full: _Counts
    swa: _Counts
    state: _Counts
    nodes: int
    leases: int
    work: int


class Reply(ctypes.Structure):
    """`Reply` in csrc/radix_cache.cpp, field for field; what each function answers is said there."""

    _fields_: ClassVar = [
        *((name, c_int64) for name in ("node", "end", "known", "state_taken", "state")),
        ("counts", c_int64 * 3),
        ("lengths", c_int64 * 6),
        ("total", c_int64),
        ("ids", c_void_p),
        ("numbers", c_int64),
        ("table", c_void_p),
        ("error", c_char_p),
    ]
    node: int
    end: int
    known: int
    state_taken: int
    state: int
    counts: Sequence[int]
    lengths: Sequence[int]
    total: int
    ids: int | None
    numbers: int
    table: int | None
    error: bytes


class PoolMemory(ctypes.Structure):
    """`Pool` in csrc/audit.h, field for field."""

    _fields_: ClassVar = [
        ("stack", c_void_p * 3),
        ("is_free", c_void_p * 3),
        ("total", c_int64 * 3),
        ("full_rows", c_void_p),
        ("swa_rows", c_void_p),
        *((name, c_int64) for name in ("max_rows", "max_pages", "max_context_len")),
    ]


_Function = Callable[..., int]
_Type = type[c_int64] | type[c_void_p] | type[c_char_p]


@final
class CompiledLibrary:
    """The loaded library. Calls keep the interpreter lock: they take microseconds, and giving it away for that long
    could cost as many milliseconds until it is back."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.PyDLL(str(path))
        self.create = self._function("create", c_void_p, *[c_int64] * 5)
        self.destroy = self._function("destroy", None, c_void_p)
        self.reply = self._function("reply", c_void_p, c_void_p)
        self.books = self._function("books", c_void_p, c_void_p)
        self.match = self._function("match", c_int64, c_void_p, c_void_p, c_int64)
        self.evictable_in = self._function("evictable_in", c_int64, c_void_p, c_int64, c_int64)
        self.lock = self._function("lock", c_int64, c_void_p, c_int64, c_int64)
        self.unlock = self._function("unlock", c_int64, c_void_p, c_int64, c_int64)
        self.pages = self._function("pages", c_int64, c_void_p, c_int64)
        insert = (c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_int64)
        self.insert = self._function("insert", c_int64, *insert)
        self.coldest = self._function("coldest", c_int64, c_void_p, c_int64)
        self.evict = self._function("evict", c_int64, c_void_p, c_int64, c_int64)
        self.cached = self._function("cached", c_int64, c_void_p)
        self.dump = self._function("dump", c_int64, c_void_p)
        self.load = self._function("load", c_int64, c_void_p, c_char_p, c_char_p, c_char_p)
        self.audit = self._function("audit", c_int64, c_void_p, c_void_p, c_void_p, c_char_p)
        for name, mirror in (("reply_bytes", Reply), ("books_bytes", Books), ("pool_bytes", PoolMemory)):
            assert self._function(name, c_int64)() == ctypes.sizeof(mirror), f"{mirror} differs in C++ and Python"

    def _function(self, name: str, result: _Type | None, *arguments: _Type) -> _Function:
        function = self._library[f"baton_radix_{name}"]
        function.restype, function.argtypes = result, arguments
        return function


@final
class CompiledTree:
    """One tree of C++. It goes when this object does. Not copyable, not picklable, not for two threads."""

    __slots__ = ("__weakref__", "books", "library", "pointer", "reply")

    def __init__(self, library: CompiledLibrary, layout: KvLayout) -> None:
        self.library = library
        seed = hash(b"of the table of children")  # as hard to guess as what Python's own dictionaries hash with
        self.pointer = library.create(layout.page_size, layout.full, layout.window, layout.state, seed)
        self.reply = Reply.from_address(library.reply(self.pointer))
        self.books = Books.from_address(library.books(self.pointer))
        weakref.finalize(self, library.destroy, self.pointer)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a compiled tree does not leave its process")

    def done(self, status: int) -> Reply:
        """The reply to a call that came back with this status."""
        if status:
            raise InvariantViolation(f"the compiled prefix tree: {self.reply.error.decode()}")
        return self.reply

    def parts(self, count: int) -> list[I32]:
        """The first kinds of ids in the reply."""
        ids, start = self.ids(), 0
        parts = []
        for length in self.reply.lengths[:count]:
            parts.append(ids[start : start + length] if length else NO_IDS)
            start += length
        return parts

    def ids(self) -> I32:
        """A copy of all ids in the reply."""
        total = self.reply.total
        return np.frombuffer(ctypes.string_at(self.reply.ids or 0, 4 * total), dtype=np.int32) if total else NO_IDS

    def table(self) -> npt.NDArray[np.int64]:
        """A copy of the table in the reply."""
        return np.frombuffer(ctypes.string_at(self.reply.table or 0, 8 * self.reply.numbers), dtype=np.int64)


def foreign(ids: I32) -> bytes | int:
    """For a call while `ids` lives: a copy, or the address where asking for it costs less than a copy."""
    if ids.nbytes < CHEAP_COPY_BYTES or not ids.flags.c_contiguous:
        return ids.tobytes()
    return ids.ctypes.data


@functools.cache
def compiled_library() -> CompiledLibrary | None:
    """None, and once per process a line in the log, when it cannot be had."""
    try:
        return load_library()
    except BuildError as error:
        _log.warning("prefix_tree_not_compiled", reason=str(error), instead="the same tree in Python serves")
        return None


def load_library() -> CompiledLibrary:
    """Compiles it if this machine has not done so yet. Raises BuildError."""
    path = built(LIBRARY, lambda message: _log.info("prefix_tree_build", message=message))
    try:
        return CompiledLibrary(path)
    except OSError as error:
        raise BuildError(f"{path} cannot be loaded: {error}") from error
