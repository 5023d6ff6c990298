"""`StepChecker`: the invariants of `checker.py` after every event, in microseconds: one compiled walk over one pool.

Owns nothing of the pool; says what the pool's memory looks like and passes the records that are held. What it finds
wrong is looked at once more by `InvariantChecker`, which says where; that one also runs every `FULL_EVERY` checks, and
in place of this one where there is no compiler.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from ctypes import byref
from operator import attrgetter

from baton.common.kv.census import Holding
from baton.common.kv.checker import InvariantChecker
from baton.common.kv.errors import InvariantViolation, OwnershipError
from baton.common.kv.layout import Component
from baton.common.kv.pool import KvPool
from baton.common.kv.prefix.compiled import CompiledTree, PoolMemory, compiled_library
from baton.common.kv.prefix.interface import PrefixLease
from baton.common.kv.prefix.mirror import Mirror
from baton.common.kv.prefix.radix_cpp import RadixCacheCpp
from baton.common.kv.prefix.tree import UnifiedRadixCache
from baton.common.kv.record import ReqKvInfo

FULL_EVERY = 256

_numbers_of = attrgetter(
    "req_pool_idx",
    "cache_protected_len",
    "kv_committed_len",
    "kv_allocated_len",
    "swa_evict_floor",
    "swa_evicted_seqlen",
    "swa_promised",
    "state_slot",
    "state_source",
)
"""`Record` in csrc/audit.h, but for its lease."""

_Holdings = Callable[[], Iterable[Holding]]


class StepChecker:
    """Of one pool. `holdings` names every live record, as `InvariantChecker` wants it."""

    def __init__(self, pool: KvPool, holdings: _Holdings) -> None:
        self._pool = pool
        self._holdings = holdings
        self._walk = InvariantChecker()
        self._checks = 0
        self._tree = _compiled_tree(pool)
        self._memory = _memory_of(pool)
        self._where = byref(self._memory)
        self._allocators = [pool.supply.allocators.get(component) for component in Component]

    def check(self, records: Sequence[ReqKvInfo]) -> None:
        """Raises InvariantViolation at the first rule that does not hold, given the records that are held now."""
        self._checks += 1
        rule = self.broken_rule(records) or self._broken_promise(records)
        if rule or self._tree is None or self._checks % FULL_EVERY == 0:
            self._walk.check(self._pool, self._holdings())
        if rule:
            raise InvariantViolation(f"{rule} (and the walk over the pool finds nothing wrong)")

    def broken_rule(self, records: Sequence[ReqKvInfo]) -> str:
        """The first that the compiled walk finds, or ""."""
        if self._tree is None:
            return ""
        try:
            tree = self._tree.tree() if isinstance(self._tree, Mirror) else self._tree
            numbers = self._numbers(records)
        except OwnershipError as error:  # a record or a lease that is used after its end
            return str(error)
        broken = tree.library.audit(tree.pointer, self._where, numbers.tobytes(), self._pool.rows.marks)
        return tree.reply.error.decode() if broken else ""

    def _broken_promise(self, records: Sequence[ReqKvInfo]) -> str:
        window = self._pool.window
        if window is not None and any(one.swa_promised != window.pages_for(one.kv_allocated_len) for one in records):
            return "C6: a record is not promised what its length may need"
        return ""

    def _numbers(self, records: Sequence[ReqKvInfo]) -> array[int]:
        """What csrc/audit.h reads: `Now`, then `Record`s, then `Lease`s."""
        pool = self._pool
        numbers = [0 if one is None else one.free_pages for one in self._allocators]
        numbers += (0 if pool.window is None else pool.window.promised, len(records), len(pool.copying))
        for record in records:
            lease = record.prefix_lock
            numbers += _numbers_of(record)
            numbers += (0, 0) if lease is None else (self._node_of(lease), lease.length)
        for lease in pool.copying:
            numbers += (self._node_of(lease), lease.length)
        return array("q", numbers)

    def _node_of(self, lease: PrefixLease) -> int:
        prefix = self._pool.prefix
        if isinstance(self._tree, Mirror):
            return self._tree.node_of(lease)
        if not isinstance(prefix, RadixCacheCpp):
            raise OwnershipError(f"a lease over {lease.length} tokens, where nothing is shared")
        return prefix.node_of(lease)


def _compiled_tree(pool: KvPool) -> CompiledTree | Mirror | None:
    """The pool's, or a copy of it; where nothing is shared, an empty one; None: there is no compiler."""
    prefix = pool.prefix
    if isinstance(prefix, RadixCacheCpp):
        return prefix.compiled
    library = compiled_library()
    if library is None:
        return None
    return (
        Mirror(library, pool.layout, prefix)
        if isinstance(prefix, UnifiedRadixCache)
        else CompiledTree(library, pool.layout)
    )


def _memory_of(pool: KvPool) -> PoolMemory:
    memory = PoolMemory(
        max_rows=pool.rows.max_rows, max_pages=pool.rows.max_pages, max_context_len=pool.max_context_len
    )
    for number, component in enumerate(Component):
        allocator = pool.supply.allocators.get(component)
        if allocator is not None:
            stack, marks = allocator.memory
            memory.stack[number], memory.is_free[number] = stack.ctypes.data, marks.ctypes.data
            memory.total[number] = allocator.total_pages
    if pool.layout.full:
        memory.full_rows = pool.rows.table.ctypes.data
    if pool.window is not None:
        memory.swa_rows = pool.window.rows.table.ctypes.data
    return memory
