"""Which pairs of probes are measured, and when. Pure.

All of few; of many a ring in both directions, and each one with one more at random, so that their number grows with
that of hosts and not with its square. Within a round nobody takes part in two pairs: they would measure each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from baton.common.ids import WorkerId

FEW = 5
"""So many probes are measured pair by pair."""


class Pair(NamedTuple):
    source: WorkerId
    receiver: WorkerId


def choose_pairs(
    probes: Sequence[WorkerId], draw: Callable[[Sequence[int]], int], *, all_pairs: bool = False
) -> list[Pair]:
    """Without repetition; both directions of each. Those that are neighbours in `probes` are among them. `draw` takes
    one of some numbers."""
    count = len(probes)
    if all_pairs or count <= FEW:
        return [Pair(one, other) for one in probes for other in probes if one != other]
    chosen: dict[Pair, None] = {}
    for index, one in enumerate(probes):
        after = (index + 1) % count
        other = draw([place for place in range(count) if place not in (index, after, (index - 1) % count)])
        for peer in (probes[after], probes[other]):
            chosen[Pair(one, peer)] = chosen[Pair(peer, one)] = None
    return list(chosen)


def rounds_of(pairs: Sequence[Pair]) -> list[list[Pair]]:
    """Every pair once, in rounds in which each probe has one part at most. First fit: at most twice the least."""
    rounds: list[tuple[set[WorkerId], list[Pair]]] = []
    for pair in pairs:
        for busy, together in rounds:
            if not busy & set(pair):
                busy.update(pair)
                together.append(pair)
                break
        else:
            rounds.append((set(pair), [pair]))
    return [together for _, together in rounds]
