"""Copies between staging slots and the units of pools: at once where the pools are host memory, and later where they
lie on a device (`device_copier.py`).

Owns: what is asked of either, and the one for the host. Never: a digest, a registration, or a decision.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol

from baton.common.kv.layout import Component
from baton.transfer.copying import copy_rows
from baton.transfer.digest import LINE_BYTES, Lines
from baton.transfer.transports.base import Bytes, Rows


class Copying(Protocol):
    """A copy under way. Until it is done both its ends are in use: it cannot be called back."""

    def done(self) -> bool:
        """Never waits. Stays true."""
        ...


class PoolCopier(Protocol):
    """Of one data plane, whose thread makes all calls; none but `close` waits. Copies are done in the order in which
    they were asked for, or in another one. Each has a slot of its own, which bounds their number."""

    @property
    def host_pools(self) -> Mapping[Component, Bytes]:
        """uint8 [units, bytes of one] over the live memory; empty where this process cannot address it. Lanes without
        slots (pull, direct) need it."""
        ...

    def shape(self, component: Component) -> tuple[int, int]:
        """Units, and the bytes of one."""
        ...

    def use_staging(self, memory: Bytes) -> None:
        """Slots of copies will lie in here; from before the first one until `close`."""
        ...

    def gather(self, source: Rows, slot: Bytes) -> Copying:
        """Fills `slot`, of exactly `source.nbytes` bytes, with the rows one after the other."""
        ...

    def gather_lines(self, source: Rows, lines: Lines, slot: Bytes) -> Copying:
        """Fills `slot` with the same lines of each row, one row after the other."""
        ...

    def scatter(self, target: Rows, data: Bytes) -> Copying:
        """The other way of `gather`. `data` may be memory of a lane instead of a slot; it is held until the copy is
        done."""
        ...

    def close(self) -> None:
        """Returns when no memory is touched any more. Copies that had not begun are left out."""
        ...


class _Done:
    def done(self) -> bool:
        return True


DONE: Final[Copying] = _Done()


class HostCopier:
    """See PoolCopier. Copies are done when they return."""

    def __init__(self, pools: Mapping[Component, Bytes]) -> None:
        for pool in pools.values():
            assert pool.ndim == 2
            assert pool.flags.c_contiguous, "one unit is one contiguous block"
        self.host_pools: Mapping[Component, Bytes] = dict(pools)

    def shape(self, component: Component) -> tuple[int, int]:
        units, unit_bytes = self.host_pools[component].shape
        return units, unit_bytes

    def use_staging(self, memory: Bytes) -> None:
        pass

    def gather(self, source: Rows, slot: Bytes) -> Copying:
        copy_rows(slot.reshape(len(source.units), -1), None, self._bytes_of(source), source.units)
        return DONE

    def gather_lines(self, source: Rows, lines: Lines, slot: Bytes) -> Copying:
        rows = self._bytes_of(source)
        for place, first in enumerate(range(lines.begin, source.row_bytes, lines.apart)):
            lined_up = slot.reshape(len(source.units), lines.count, LINE_BYTES)
            lined_up[:, place] = rows[source.units, first : first + LINE_BYTES]
        return DONE

    def scatter(self, target: Rows, data: Bytes) -> Copying:
        copy_rows(self._bytes_of(target), target.units, data.reshape(len(target.units), -1), None)
        return DONE

    def close(self) -> None:
        pass

    def _bytes_of(self, rows: Rows) -> Bytes:
        return rows.of(self.host_pools[rows.component])
