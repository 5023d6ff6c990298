"""`StateSlots`: the recurrent states of all records of one pool, each in a slot of its own. Owns no slot.

A state is only ever that of one length, and a step overwrites it. So a record that shares a prefix gets a slot of its
own, into which its first step copies the checkpoint (`state_source`); the lease keeps the checkpoint until then. A
checkpoint is made without copying: the tree takes the record's slot as it is, and the record's next step begins by
copying it into a fresh one.
Never: copies a state (the step does: `Batch.state_copies`).
"""

from __future__ import annotations

import numpy as np

from baton.common.kv.errors import OwnershipError
from baton.common.kv.layout import Component
from baton.common.kv.prefix.interface import I32, PrefixLease
from baton.common.kv.record import NO_COPY, ReqKvInfo
from baton.common.kv.supply import Supply
from baton.common.kv.verdicts import Refused


class StateSlots:
    """Of a layout with recurrent layers."""

    def __init__(self, supply: Supply) -> None:
        self._supply = supply

    def checkpoint(self, lease: PrefixLease | None) -> int:
        """What a state at the end of the lease is copied from; without one it begins with zeros."""
        return 0 if lease is None else self._supply.prefix.pages(lease).state_slot

    def start_over(self, record: ReqKvInfo) -> None:
        """The record goes back to what its lease protects: its own slot holds nothing of use."""
        record.state_source = self.checkpoint(record.prefix_lock)

    def written(self, record: ReqKvInfo) -> None:
        """Its own slot holds the state of what is committed."""
        record.state_source = NO_COPY

    def take_copy(self, record: ReqKvInfo) -> tuple[int, int] | None:
        """(from, to), which the step that is being planned has to copy before it computes; None when there is none."""
        if record.state_source == NO_COPY:
            return None
        copy = (record.state_source, record.state_slot)
        record.state_source = NO_COPY
        return copy

    def readable(self, record: ReqKvInfo) -> int:
        """The slot that holds the state of what is committed: its own, or the checkpoint that the next step copies."""
        if record.state_source == 0:
            raise OwnershipError(f"{record!r} has no state yet")
        return record.state_slot if record.state_source == NO_COPY else record.state_source

    def spare(self) -> int:
        """A slot for a record whose own one goes to the tree; 0 when there is none to be had."""
        slot = self._supply.obtain(Component.STATE, 1)
        return 0 if isinstance(slot, Refused) else int(slot[0])

    def fork(self, record: ReqKvInfo, spare: int) -> None:
        """The tree took its slot: it goes on in `spare`."""
        self._supply.note("row -> cached", Component.STATE, _one(record.state_slot), record.req_pool_idx)
        self._supply.note("free -> row", Component.STATE, _one(spare), record.req_pool_idx)
        record.state_source, record.state_slot = record.state_slot, spare

    def give_back(self, slot: int, row: int | None) -> None:
        if slot:
            self._supply.give_back(Component.STATE, _one(slot), "row -> free", row)


def _one(slot: int) -> I32:
    return np.array([slot], dtype=np.int32)
