"""Staging memory, and the one place where a peer's bytes turn into pages.

Owns: the ring of staging slots with its leases, the registration of every hand-off that may still write pages, and the
copy between slots and pages in both directions. Never: a socket, a decision about a hand-off, or a page that was not
registered.

Invariants. R1: every slot is free, or reserved for one hand-off, or leased to one operation; a lease ends only by
`give_back`, so a slot whose operation has not provably ended is *quarantined*: its hand-off may be long gone. R2: no
overcommit: a reservation is backed by slots that exist now. S1: bytes reach pages only through `_scatter_region`, only
after size and digest were right, and only pages of a registration that is still there. S2: a copy that has begun goes
on (`pool_copier.py`): whoever asked for it keeps slot and pages until it is done.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from baton.common.engine.batch import KvMemory
from baton.common.ids import HandoffKey
from baton.common.kv.layout import Component
from baton.common.kv.page_layout import PageLayout
from baton.common.messages import Chunk, unpack_tokens
from baton.transfer.digest import RegionDigest, digest_of
from baton.transfer.plan import NO_LAYERS, Cut, Span, layers_of_part, pieces_of_state, stretch_of
from baton.transfer.pool_copier import Copying, PoolCopier
from baton.transfer.transports.base import Bytes, Rows, UnitIds


@dataclass(slots=True, eq=False)
class SlotLease:
    """One slot in the hands of one operation, stamped with what it is for."""

    key: HandoffKey
    seq: int
    index: int
    view: Bytes  # the whole slot
    ended: bool = False


class StagingRing:
    """`slots` slots of `slot_bytes` bytes. Memory is touched, and so paid for, when a slot is first used."""

    def __init__(self, ring_bytes: int, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self.slots = ring_bytes // slot_bytes
        assert self.slots > 0, f"a ring of {ring_bytes} bytes holds no slot of {slot_bytes}"
        self._map = mmap.mmap(-1, self.slots * slot_bytes)
        self.memory = np.frombuffer(self._map, dtype=np.uint8)
        self._free = list(range(self.slots - 1, -1, -1))
        self._reserved: dict[HandoffKey, list[int]] = {}
        self._leases: dict[int, SlotLease] = {}

    def reserve(self, key: HandoffKey, count: int) -> None:
        """`count` slots more for `key`; so many are free."""
        assert 0 < count <= len(self._free), f"{count} of {len(self._free)} slots"
        self._reserved.setdefault(key, []).extend(self._free.pop() for _ in range(count))

    def release(self, key: HandoffKey) -> None:
        """One of the slots reserved for `key` that no operation has becomes free."""
        self._free.append(self._reserved[key].pop())

    def lease(self, key: HandoffKey, seq: int) -> SlotLease | None:
        """One of the slots reserved for `key`; None when all of them are leased or none was reserved."""
        idle = self._reserved.get(key)
        return self._lease(key, seq, idle.pop()) if idle else None

    def lease_free(self, key: HandoffKey, seq: int) -> SlotLease | None:
        """A slot that nobody reserved; None when there is none."""
        return self._lease(key, seq, self._free.pop()) if self._free else None

    def give_back(self, lease: SlotLease) -> None:
        """The operation has provably ended. The slot returns to its hand-off's reservation, when that is still there.
        Consumes the lease."""
        assert not lease.ended, f"slot {lease.index} given back twice"
        lease.ended = True
        del self._leases[lease.index]
        self._reserved.get(lease.key, self._free).append(lease.index)

    def close(self, key: HandoffKey) -> None:
        """Ends the reservation. Leased slots stay out (quarantined) until they are given back. Unknown is fine."""
        self._free.extend(self._reserved.pop(key, ()))

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def leased(self) -> int:
        return len(self._leases)

    @property
    def reserved(self) -> int:
        """Reserved and not leased."""
        return sum(map(len, self._reserved.values()))

    @property
    def counts(self) -> tuple[int, int, int]:
        """Free, reserved, leased."""
        return self.free, self.reserved, self.leased

    def check(self) -> None:
        """R1 and R2, by a full walk."""
        idle = [index for indices in self._reserved.values() for index in indices]
        every = sorted([*self._free, *idle, *self._leases])
        assert every == list(range(self.slots)), f"slots are not partitioned: {every}"

    def _lease(self, key: HandoffKey, seq: int, index: int) -> SlotLease:
        lease = SlotLease(key, seq, index, self.memory[index * self.slot_bytes : (index + 1) * self.slot_bytes])
        self._leases[index] = lease
        return lease


@dataclass(frozen=True, slots=True)
class Scattered:
    """The region is in its pages."""

    nbytes: int
    scatter_s: float


@dataclass(frozen=True, slots=True)
class Damaged:
    """Wrong size or digest: worth a second try."""

    reason: str


@dataclass(frozen=True, slots=True)
class NotMine:
    """No such registration, or a region that is no part of it: nothing a second try could mend."""

    reason: str


@dataclass(frozen=True, slots=True)
class Scattering:
    """The region is right, and on its way into its pages."""

    key: HandoffKey
    chunk: Chunk
    copying: Copying
    started_s: float


Scatter = Scattered | Damaged | NotMine


@dataclass(frozen=True, slots=True)
class Reading:
    """What a region's digest is made of, on its way out of pages that the host cannot address, into a slot."""

    copying: Copying
    data: Bytes

    def digest(self) -> int:
        """Once it is there."""
        assert self.copying.done()
        return digest_of(self.data)


class StagingHandler:
    """Has regions copied between staging memory and the units of each component's pool, each of `layers`."""

    def __init__(
        self,
        copier: PoolCopier,
        digest: RegionDigest,
        layers: Mapping[Component, int] = NO_LAYERS,
        memory: KvMemory | None = None,
    ) -> None:
        """`memory`: what the pools of `copier` are, where pages of another layout may come."""
        self.copier = copier
        self._memory = memory
        self._digest = digest
        self._layers = layers
        self._destinations: dict[HandoffKey, dict[Component, UnitIds]] = {}
        self._layouts: dict[HandoffKey, PageLayout] = {}  # of those that come in another one than ours
        self._landed: dict[HandoffKey, dict[int, Chunk]] = {}

    def unit_bytes(self, component: Component) -> int:
        return self.copier.shape(component)[1]

    def takes(self, layout: PageLayout | None) -> bool:
        """Whether pages that are laid out like this can be put into our own order."""
        return self._memory is None or layout is self._memory.main.page_layout or self._reorders(layout)

    def _reorders(self, layout: PageLayout | None) -> bool:
        if self._memory is None or layout is None or layout.form != self._memory.main.page_layout.form:
            return False
        return bool(self.copier.host_pools)

    def register_decode_req(self, key: HandoffKey, spans: Sequence[Span], layout: PageLayout | None = None) -> None:
        """From now on regions of `key` may land in the units of `spans`, one for each whole segment, until `forget`.
        Before the offer leaves, so that no region can arrive unexpected. `layout`: of the sender's pages."""
        assert key not in self._destinations, f"{key} is registered"
        destination = {span.component: unpack_tokens(span.pages) for span in spans}
        assert len(destination) == len(spans), "two segments of one component"
        for component, units in destination.items():
            assert units.min() > 0, "the null page"
            assert units.max() < self.copier.shape(component)[0], "a page outside of the pool"
        self._destinations[key] = destination
        self._landed[key] = {}
        if self._memory is not None and layout is not None and layout is not self._memory.main.page_layout:
            self._layouts[key] = layout

    def forget(self, key: HandoffKey) -> None:
        """After this nothing of `key` writes a page. Unknown is fine."""
        self._destinations.pop(key, None)
        self._layouts.pop(key, None)
        self._landed.pop(key, None)

    def rows_of(self, span: Span) -> Rows:
        """What travels of the units of `span`."""
        return self._rows(span, unpack_tokens(span.pages))

    def _rows(self, cut: Cut, units: UnitIds) -> Rows:
        layers = self._layers.get(cut.component, 1)
        begin, end = stretch_of(self.unit_bytes(cut.component), layers, cut.part, cut.parts)
        return Rows(cut.component, units, begin, end)

    def destination_of(self, key: HandoffKey, chunk: Chunk) -> Rows | Damaged | NotMine:
        """What of the registered units `chunk` fills, or why it fills nothing."""
        destination = self._destinations.get(key)
        if destination is None:
            return NotMine("no such hand-off is registered")
        end = chunk.first_unit + chunk.units
        registered = destination.get(chunk.component)
        if registered is None or end > len(registered):
            count = 0 if registered is None else len(registered)
            return NotMine(f"units [{chunk.first_unit}, {end}) of {chunk.component} are outside of {count}")
        before = self._landed[key].get(chunk.seq, chunk)
        if _place(before) != _place(chunk):
            return NotMine(f"region {chunk.seq} has landed elsewhere")
        target = self._rows(chunk, registered[chunk.first_unit : end])
        if chunk.nbytes != target.nbytes:
            return Damaged(f"{chunk.nbytes} bytes announced, {target.nbytes} belong there")
        return target

    def _scatter_region(self, key: HandoffKey, chunk: Chunk, data: Bytes) -> Scatter | Scattering:
        """Verifies the staged bytes of `chunk` and copies them into its units. The only writer of a peer's bytes."""
        target = self.destination_of(key, chunk)
        if not isinstance(target, Rows):
            return target
        if len(data) != target.nbytes:
            return Damaged(f"{len(data)} bytes came, {target.nbytes} belong there")
        if self.digest_staged(target, data, chunk.seq) != chunk.digest:
            return Damaged("digest differs")
        started = time.perf_counter()
        scattering = Scattering(key, chunk, self.copier.scatter(target, data), started)
        return self.scattered(scattering) if scattering.copying.done() else scattering

    def scattered(self, scattering: Scattering) -> Scattered:
        """It is done, and its hand-off is still registered."""
        return self._note_landed(scattering.key, scattering.chunk, scattering.started_s)

    def verify_placed(
        self, key: HandoffKey, chunk: Chunk, started: float | None = None, reading: Reading | None = None
    ) -> Scatter:
        """The same for a lane that has put the bytes into the units itself: they are the hand-off's and hold nothing
        yet, so they may hold a damaged region until it comes again. `started` is when the copy began, if it was one.
        `reading` has been read from the units since, where they are not host memory."""
        target = self.destination_of(key, chunk)
        if not isinstance(target, Rows):
            return target
        digest = self.digest(target, chunk.seq) if reading is None else reading.digest()
        if digest != chunk.digest:
            return Damaged("digest differs")
        return self._note_landed(key, chunk, time.perf_counter() if started is None else started)

    def digest(self, rows: Rows, seq: int) -> int:
        """Of what travels as region `seq`."""
        return self._digest.of_pages(rows.of(self.copier.host_pools[rows.component]), rows.units, seq)

    def read_for_digest(self, rows: Rows, seq: int, slot: Bytes) -> Reading:
        """The same where the host cannot address the pools: begins to bring what counts into `slot`, which has room
        for all of the region."""
        lines = self._digest.lines(rows.row_bytes, seq)
        if lines is None:
            data = slot[: rows.nbytes]
            return Reading(self.copier.gather(rows, data), data)
        data = slot[: len(rows.units) * lines.nbytes]
        return Reading(self.copier.gather_lines(rows, lines, data), data)

    def digest_staged(self, rows: Rows, data: Bytes, seq: int) -> int:
        """The same, of their gathered bytes."""
        return self._digest.of_staged(data, rows.row_bytes, seq)

    def _note_landed(self, key: HandoffKey, chunk: Chunk, started: float) -> Scattered:
        """Its bytes are in their units, and right: nobody has read them there yet."""
        layout = self._layouts.get(key)
        if layout is not None:
            assert self._memory is not None
            units = self._destinations[key][chunk.component][chunk.first_unit : chunk.first_unit + chunk.units]
            layers = layers_of_part(self._layers.get(chunk.component, 1), chunk.part, chunk.parts)
            self._memory.buffers[chunk.component].adopt(units, layers, layout)
        self._landed[key][chunk.seq] = chunk
        return Scattered(chunk.nbytes, time.perf_counter() - started)


def _place(cut: Cut) -> tuple[object, ...]:
    return cut.component, cut.first_unit, cut.units, cut.part, cut.parts


def state_pieces_of(memory: KvMemory) -> int:
    """Units of a state in this memory; 1 where there is none."""
    state = memory.buffers.get(Component.STATE)
    return pieces_of_state(state.page_bytes) if state is not None else 1


def unit_rows(memory: KvMemory) -> dict[Component, Bytes]:
    """The pools as what travels: uint8 [units, bytes of one] views over the live memory."""
    pieces = dict.fromkeys(memory.buffers, 1) | {Component.STATE: state_pieces_of(memory)}
    return {
        component: buffer.as_bytes().reshape(buffer.num_pages * pieces[component], -1)
        for component, buffer in memory.buffers.items()
    }
