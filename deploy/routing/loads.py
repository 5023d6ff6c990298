"""What workers say of themselves. Owns what was last heard of each that lives, and who of them drains. Never decides
anything.

Loads may be heard in another order than they were said, from the worker itself or by way of the controller; but who
drains does so for good.
"""

from __future__ import annotations

from collections.abc import Collection

from msgspec import structs

from baton.common.ids import Stamp
from baton.common.messages import Load, Member


class Loads:
    def __init__(self) -> None:
        self._heard: dict[Stamp, Load] = {}
        self._draining: set[Stamp] = set()

    def heard(self, stamp: Stamp, load: Load) -> Load:
        """From the worker itself. Returns what is known of it now."""
        self._heard[stamp] = load
        return self._known(stamp, load)

    def of(self, member: Member) -> Load:
        """As long as nothing was heard: what the controller has been told."""
        self._known(member.stamp, member.load)
        return self._known(member.stamp, self._heard.get(member.stamp, member.load))

    def keep(self, alive: Collection[Stamp]) -> None:
        """Of all others nothing is known any more."""
        self._heard = {stamp: load for stamp, load in self._heard.items() if stamp in alive}
        self._draining.intersection_update(alive)

    def _known(self, stamp: Stamp, load: Load) -> Load:
        if load.draining:
            self._draining.add(stamp)
        return structs.replace(load, draining=True) if stamp in self._draining else load
