"""How many staging slots each hand-off may have, and who is next to get some. Pure.

Owns: the line of those that wait, and how many slots each hand-off was promised. Never: a slot itself (`staging.py`).

Rules, of which freedom from deadlock follows (docs/TRANSFER-PROTOCOL.md):
- L1  Only slots that are free are promised, and at least one to each hand-off: with one it can finish.
- L2  At first a hand-off gets half of what is free at most. While others wait, a slot that comes free goes to them,
      down to one per hand-off; when nobody waits, a hand-off grows again, up to what it wants.
- L3  The line moves in turns (`turns.py`): by priority, then by arrival, and nobody waits for ever.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.common.ids import HandoffKey
from baton.transfer.turns import TURN_BYTES, Turns


@dataclass(slots=True)
class _Share:
    held: int
    want: int


class SlotShares:
    """The caller says how many slots are free: those that are neither promised nor still in a transport's hands."""

    def __init__(self) -> None:
        self._line: Turns[tuple[HandoffKey, int]] = Turns()
        self._shares: dict[HandoffKey, _Share] = {}

    def __contains__(self, key: HandoffKey) -> bool:
        """Whether it waits or holds slots."""
        return key in self._shares or key in self._line

    @property
    def waiting(self) -> int:
        return len(self._line)

    def ask(self, key: HandoffKey, priority: int, want: int) -> None:
        """Joins the line. More than `want` slots are of no use to it."""
        assert want > 0, key
        assert key not in self._shares, f"{key} has slots"
        self._line.put(key, priority, (key, want), TURN_BYTES)

    def grant(self, free: int) -> tuple[HandoffKey, int] | None:
        """The next one, and the slots that it gets; None: nobody waits, or nothing is free."""
        taken = self._line.take() if free > 0 else None
        if taken is None:
            return None
        key, want = taken
        self._line.forget(key)
        share = self._shares[key] = _Share(min(want, (free + 1) // 2), want)
        return key, share.held

    def landed(self, key: HandoffKey, free: int) -> int:
        """A region has landed in a slot of `key`. What becomes of that slot: 0: no longer the hand-off's; 1: it stays;
        2: it stays, and the hand-off gets another one."""
        share = self._shares[key]
        if self.waiting and share.held > 1:
            share.held -= 1
            return 0
        if not self.waiting and free > 0 and share.held < share.want:
            share.held += 1
            return 2
        return 1

    def close(self, key: HandoffKey) -> None:
        """It wants and holds nothing any more. Unknown is fine."""
        self._line.forget(key)
        self._shares.pop(key, None)
