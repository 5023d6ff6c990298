"""What goes wrong in a random world, and when. All of it is drawn before the world begins. Each fault has a name, and
one that is left out changes nothing about when the others strike: that is how a failing world is made smaller.

Owns the plan only. What a fault does to a process or a link is `world.World`'s and `network.Network`'s.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from random import Random
from typing import TYPE_CHECKING, Any

from baton.common.ids import CONTROLLER, WorkerId
from baton.deploy.sim.lanes import DIRECT_LANE, STAGED_LANE
from baton.deploy.sim.process import SimProcess

if TYPE_CHECKING:
    from baton.deploy.sim.settings import WorldSettings
    from baton.deploy.sim.world import World

Strike = Callable[[WorkerId | None], None]
"""Given who was there when an aimed fault strikes (None: nobody in particular)."""

AIMS = (
    "command",
    "hand_off_frame",
    "land_region",
    "bytes_moving",
    "landing_ended",
    "engine_event",
    "fence_sink",
    "frame_lost",
    "tier_command",
    "layers_over",
    "client_gone",
)
"""Probes just after the nth hit of which a fault strikes."""
LASTS_S = (0.3, 1.5, 5.0)
HANGS_S = (1.5, 8.0, 20.0)
CONTROLLER_DOWN_S = 3.0
MOST_WORKERS = 4
STORM_S = 0.02
STORM_SHARE = 0.8

LINK_FAULTS = ("loss", "duplicate", "reorder", "region_damaged", "region_lost")
OTHER_SETTINGS = {
    "bad_starts": 0.0,
    "lost_kills": 0.0,
    "clock_offset_s": 0.0,
    "clock_drift": 0.0,
    "half_open": 0.0,
    "successor_pages": 1.0,
    "tier_loss": 0.0,
}
"""Faults that are settings, and what they are without."""


def names_of_settings(settings: WorldSettings) -> list[str]:
    """Which faults the settings themselves switch on."""
    links = [name for name in LINK_FAULTS if getattr(settings.links, name)]
    return links + [name for name, without in OTHER_SETTINGS.items() if getattr(settings, name) != without]


def is_steady(settings: WorldSettings) -> bool:
    """Whether all processes are there all the time and can reach each other, whatever is lost on the way."""
    struck = settings.crashes + settings.pauses + settings.partitions + settings.clogs + settings.hangs
    planned = settings.drains + settings.flips + settings.lane_hangs + settings.upgrades + settings.scales
    return not struck + planned + settings.controller_crashes and not settings.half_open


def is_prompt(settings: WorldSettings) -> bool:
    """Whether each frame arrives soon, on top of that."""
    return is_steady(settings) and not settings.links.loss and not settings.links.reorder


def without(settings: WorldSettings, left_out: Collection[str]) -> WorldSettings:
    """The same world with these faults switched off."""
    links: dict[str, Any] = {name: 0.0 for name in LINK_FAULTS if name in left_out}
    others: dict[str, Any] = {name: value for name, value in OTHER_SETTINGS.items() if name in left_out}
    return dataclasses.replace(settings, links=dataclasses.replace(settings.links, **links), **others)


def plan_faults(world: World, first_s: float, left_out: Collection[str]) -> list[str]:
    """Half of them at any time, half of them aimed: a moment after the nth event of some kind in a hand-off. Returns
    their names."""
    settings, rng = world.settings, world.rng
    names = []
    for name, strike in _draw(world):
        names.append(name)
        wanted = name not in left_out
        if rng.random() < 0.5:
            at_s = first_s + rng.random() * (settings.arrival_s + 0.5)
            if wanted:
                world.schedule.at(at_s, strike, None)
        else:
            aim = rng.choice(AIMS), rng.randint(1, 30), rng.random() * 0.005, rng.random() < 0.5
            if wanted:
                _aim(world, *aim, strike)
    return names + _plan_scales(world, first_s, left_out)


def _plan_scales(world: World, first_s: float, left_out: Collection[str]) -> list[str]:
    """At any time. Drawn apart from all others, which are what they are without them."""
    rng = Random(world.seed ^ 0x5CA1E5)
    names = [f"scale{number}" for number in range(world.settings.scales)]
    for name in names:
        role, count = rng.choice(("prefill", "decode", "decode")), rng.randint(1, MOST_WORKERS)
        at_s = first_s + rng.random() * (world.settings.arrival_s + 0.5)
        if name not in left_out:
            world.schedule.at(at_s, world.scale, role, count)
    return names


def _draw(world: World) -> list[tuple[str, Strike]]:
    settings, rng = world.settings, world.rng
    workers = [spec.worker for spec in world.specs]
    victims = [spec.worker for spec in world.specs if spec.role != "gateway" or settings.gateways > 1]

    def crash() -> Strike:
        worker, seen = rng.choice(victims), rng.random() < 0.7
        return lambda hit: world.crash(hit or worker, seen)

    def pause() -> Strike:
        worker, seconds = rng.choice([*victims, CONTROLLER]), rng.choice(LASTS_S)
        return lambda hit: world.pause(hit or worker, seconds)

    def partition() -> Strike:
        a, b = rng.sample([*workers, CONTROLLER], 2)
        seconds, both = rng.choice(LASTS_S), rng.random() < 0.5
        return lambda _: world.partition(a, b, seconds, both)

    def clog() -> Strike:
        (a, b), seconds = rng.sample([*workers, CONTROLLER], 2), rng.choice(LASTS_S)
        return lambda _: world.clog(a, b, seconds)

    def hang() -> Strike:
        worker = rng.choice(workers)
        return lambda hit: world.hang(hit or worker)

    def drain() -> Strike:
        worker = rng.choice(workers)
        return lambda hit: world.drain(hit or worker)

    def flip() -> Strike:
        worker = rng.choice(workers)
        return lambda hit: world.flip(hit or worker)

    def upgrade() -> Strike:
        return lambda _: world.upgrade()

    def controller_crash() -> Strike:
        down_s = rng.random() * CONTROLLER_DOWN_S
        return lambda _: world.crash_controller(down_s)

    def lane_hang() -> Strike:
        (a, b), lane, seconds = rng.sample(workers, 2), rng.choice((STAGED_LANE, DIRECT_LANE)), rng.choice(HANGS_S)
        return lambda _: world.hang_lane(a, b, lane, seconds)

    kinds: tuple[tuple[str, int, Callable[[], Strike]], ...] = (
        ("crash", settings.crashes, crash),
        ("pause", settings.pauses, pause),
        ("partition", settings.partitions, partition),
        ("clog", settings.clogs, clog),
        ("hang", settings.hangs, hang),
        ("drain", settings.drains, drain),
        ("controller", settings.controller_crashes, controller_crash),
        ("cancel", settings.cancels, lambda: lambda _: world.cancel_someone()),
        ("storm", settings.storms, lambda: lambda _: _storm(world)),
        ("flip", settings.flips, flip),
        ("lane", settings.lane_hangs, lane_hang),
        ("upgrade", settings.upgrades, upgrade),
    )
    return [(f"{kind}{number}", make()) for kind, count, make in kinds for number in range(count)]


def _storm(world: World) -> None:
    """Most clients leave at almost the same time."""
    for request in [one for one in world.clients.requests.values() if not one.outcome]:
        if world.rng.random() < STORM_SHARE:
            world.schedule.after(world.rng.random() * STORM_S, world.cancel, request)


def _aim(world: World, name: str, nth: int, delay_s: float, whoever: bool, strike: Strike) -> None:
    """It strikes once, just after the nth probe `name`: whoever was there, or somebody else."""
    left = nth

    def hook(_: World, details: object) -> None:
        nonlocal left
        left -= 1
        if left == 0 and world.now < world.calm_s:
            process = details[0] if isinstance(details, tuple) else None
            hit = process.stamp.worker if whoever and isinstance(process, SimProcess) else None
            world.schedule.after(delay_s, strike, hit)

    world.on(name, hook)
