"""The fake model's steps, compiled: what `fake_runner` does with arrays, in one call per component. Same bytes, same
tokens.

Owns: the foreign signatures and the memory that answers are written to. Never: decides what happens without a compiler
(`fake_runner` does the same in numpy then).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from ctypes import byref, c_int64, c_void_p
from pathlib import Path
from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt

from baton.common.engine.batch import I32, Batch, KvMemory, PageTable
from baton.common.kv.layout import Component
from baton.common.native import BuildError, NativeLibrary, built

LIBRARY: Final = NativeLibrary(
    name="fake_model",
    what="the fake model (once; about a second)",
    sources=Path(__file__).parent / "csrc_fake",
    flags=("-O2",),
)


class _Memory(ctypes.Structure):
    """`Memory` in csrc_fake/fake_model.cpp, field for field."""

    _fields_: ClassVar = [
        ("pages", c_void_p),
        *((name, c_int64) for name in ("num_pages", "layers", "per_page", "words", "component", "window")),
    ]


@functools.cache
def fake_step() -> Callable[..., int] | None:
    """None: it cannot be compiled here."""
    try:
        library = ctypes.PyDLL(str(built(LIBRARY)))
    except (BuildError, OSError):
        return None
    size = library["baton_fake_memory_bytes"]
    size.restype = c_int64
    assert size() == ctypes.sizeof(_Memory), "_Memory differs in C++ and Python"
    step = library["baton_fake_step"]
    step.restype = c_int64
    step.argtypes = (c_void_p, c_int64, *[c_void_p] * 6, c_int64, c_int64, c_int64, c_void_p, c_void_p)
    return step


class CompiledStep:
    """Of one component of one worker's memory."""

    def __init__(self, step: Callable[..., int], memory: KvMemory, component: Component) -> None:
        buffer, layout = memory.buffers[component], memory.layout
        per_page = 1 if component is Component.STATE else layout.page_size
        self.layers = buffer.layers
        self._step = step
        self._bytes = buffer.as_bytes()
        self._state = component is Component.STATE
        self._memory = _Memory(
            pages=self._bytes.ctypes.data,
            num_pages=buffer.num_pages,
            layers=buffer.layers,
            per_page=per_page,
            words=buffer.page_bytes // (8 * per_page * buffer.layers),
            component=list(Component).index(component),
            window=layout.window,
        )
        self._where = byref(self._memory)
        self._out = np.zeros(64, dtype=np.uint64)
        self._out_at = self._out.ctypes.data

    def run(
        self, batch: Batch, table: PageTable | None, begin: int, end: int, wanted: npt.NDArray[np.int64]
    ) -> list[int]:
        """Writes layers [begin, end) of the step's tokens; returns the digests of the rows `wanted`. `table` is None
        for a state."""
        if len(wanted) > len(self._out):
            self._out = np.zeros(2 * len(wanted), dtype=np.uint64)
            self._out_at = self._out.ctypes.data
        slots: npt.NDArray[np.int64] | I32
        if table is None:
            assert batch.state_slots is not None
            slots, offsets, pages = batch.state_slots.astype(np.int64), b"", b""
        else:
            slots, offsets, pages = table.slots, table.page_offsets.tobytes(), table.page_ids.tobytes()
        odd = self._step(
            self._where,
            batch.num_rows,
            batch.input_ids.tobytes(),
            slots.tobytes(),
            batch.q_offsets.tobytes(),
            batch.kv_lens.tobytes(),
            offsets,
            pages,
            begin,
            end,
            len(wanted),
            wanted.tobytes(),
            self._out_at,
        )
        assert not odd, "a page or slot that the pool does not have"
        digests: list[int] = self._out[: len(wanted)].tolist()
        return digests
