"""Makes a failing world small: leaves out requests, conversations and faults for as long as it fails in the same way.

Owns nothing. What is left out moves nothing else that was planned (`faults`, `workload`), but chance in the network
falls otherwise; so a part may be needed that has nothing to do with the failure, and shrinking is tried part by part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from baton.deploy.sim.faults import names_of_settings
from baton.deploy.sim.settings import random_settings
from baton.deploy.sim.world import World, run_seed

MOST_TRIES = 400


class Shrunk(NamedTuple):
    """`left_out` is not needed for the failure, `kept` is."""

    left_out: list[str]
    kept: list[str]
    error: Exception
    tries: int


def parts_of(seed: int) -> list[str]:
    """Everything about a random world that can be left out: faults first, they tell most."""
    world = World(random_settings(seed), seed)
    asked, faults = world.plan_random()
    return [*faults, *names_of_settings(world.settings), *asked]


def how_it_fails(seed: int, left_out: list[str]) -> Exception | None:
    try:
        run_seed(seed, left_out=left_out)
    except Exception as error:  # noqa: BLE001 - any failure is a finding
        return error
    return None


def shrink(seed: int, left_out: list[str], say: Callable[[str], None]) -> Shrunk | None:
    """None: it does not fail."""
    error = how_it_fails(seed, left_out)
    if error is None:
        return None
    kept = [part for part in parts_of(seed) if part not in left_out]
    tries, size = 1, max(1, len(kept) // 2)
    while tries < MOST_TRIES:
        before = len(kept)
        for start in range(0, before, size):
            dropped = kept[start : start + size] if start < len(kept) else []
            if not dropped or tries >= MOST_TRIES:
                break
            tries += 1
            after = how_it_fails(seed, [*left_out, *dropped])
            if type(after) is type(error):
                assert after is not None
                error, left_out = after, [*left_out, *dropped]
                kept = [part for part in kept if part not in dropped]
                say(f"{len(kept)} parts left: {', '.join(kept)}")
        if size == 1 and len(kept) == before:
            break
        size = max(1, size // 2)
    return Shrunk(left_out, kept, error, tries)
