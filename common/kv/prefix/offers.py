"""What may be offered to a tree, and that every id of it is accounted for. The same for each implementation."""

from __future__ import annotations

import numpy as np

from baton.common.kv.errors import OwnershipError
from baton.common.kv.layout import KvLayout
from baton.common.kv.prefix.interface import GroupPages, Inserted


def check_given(layout: KvLayout, given: GroupPages, count: int) -> None:
    """Raises OwnershipError unless `given` can be the pages of a span with `count` whole ones."""
    full, swa, states = len(given.full), len(given.swa), len(given.state)
    unknown = (full and not layout.full) or (swa and not layout.window) or states > int(layout.state)
    short = count < 0 or (layout.full and full < count) or (layout.window and swa < count)
    if unknown or short:
        raise OwnershipError(f"{given.counts} offered for {count} whole pages of {layout}")
    if np.count_nonzero(given.full) < full or (states and not given.state_slot):
        raise OwnershipError(f"the null page is offered: {given.full.tolist()}, state {given.state.tolist()}")


def assert_adds_up(given: GroupPages, kept: Inserted) -> None:
    """Every id that was given is taken, a duplicate or tail."""
    taken, duplicate, tail = kept.taken, kept.duplicate, kept.tail
    assert len(taken.full) + len(duplicate.full) + len(tail.full) == len(given.full), (given, kept)
    assert len(taken.swa) + len(duplicate.swa) + len(tail.swa) == np.count_nonzero(given.swa), (given, kept)
    assert len(taken.state) + len(duplicate.state) + len(tail.state) == len(given.state), (given, kept)
