"""Whose turn it is to be replaced while a cluster is upgraded. Pure.

Owns: the order. Never: asks anybody to leave (`controller_core` does, one at a time).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.common.ids import WorkerId


@dataclass(frozen=True, slots=True)
class Turn:
    """A seat as it stands. `there`: its process takes requests, and has shown that it can; `outdated`: it is of another
    revision than is wanted; `alone`: nobody else of its role takes requests."""

    worker: WorkerId
    role: str
    there: bool
    outdated: bool
    alone: bool


def next_to_replace(seats: Sequence[Turn]) -> WorkerId | None:
    """None: nobody, or not before all are there. Two revisions may be two groups, and each needs both roles: so the
    role of which the smaller share is done comes next, decode first, which can do without the other. For the same
    reason who is alone is replaced in the end. Gateways are last: they know both groups."""
    outdated = [seat for seat in seats if seat.outdated]
    if not outdated or not all(seat.there for seat in seats):
        return None

    def order(seat: Turn) -> tuple[bool, bool, float, bool]:
        alike = [one for one in seats if one.role == seat.role]
        done = sum(not one.outdated for one in alike) / len(alike)
        return seat.role == "gateway", seat.alone, done, seat.role != "decode"

    return min(outdated, key=order).worker
