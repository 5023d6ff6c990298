"""What a gateway knows of the workers that it chooses from, kept up to date; and the choice. Pure.

Owns: the last load of each member, what this gateway has placed on it, the seats of either role, and the index of what
workers have cached, where the policy wants one. Never: knows a request, or sends anything.

What was placed on a prefill worker will be cached there before long, so it counts as cached as soon as it is placed:
prompts that come together and begin alike are not computed side by side for want of news.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from baton.common.engine.core_api import MembershipView, SendTo
from baton.common.ids import Stamp
from baton.common.kv.events import page_names
from baton.common.messages import KvEvents, KvSnapshot, Load
from baton.common.routing_config import RoutingConfig
from baton.deploy.routing.index import NO_INDEX, IndexCounts, PrefixIndex
from baton.deploy.routing.loads import Loads
from baton.deploy.routing.own_policy import OwnPolicy, policy_of
from baton.deploy.routing.policies import I64, Bools, Policy, Role
from baton.deploy.routing.seats import Seats

I32 = npt.NDArray[np.int32]


class Placement(Struct, frozen=True):
    """Something that was given to a worker; taken back with `Router.leave`. `tokens`: what it has to do of it; `names`:
    the pages that it will have cached then."""

    stamp: Stamp
    tokens: int
    names: tuple[int, ...] = ()


class _Placed:
    """On one worker, of this gateway's."""

    __slots__ = ("names", "requests", "tokens")

    def __init__(self) -> None:
        self.requests = 0
        self.tokens = 0
        self.names: Counter[int] = Counter()


class Router:
    """`on_view`, `heard` and `on_kv` tell it news; `place` chooses, and remembers it until `leave`."""

    def __init__(self, config: RoutingConfig, page_size: int, resend_s: float, policy: Policy | None = None) -> None:
        """Raises ConfigError when there is no such policy."""
        self._policy = policy or policy_of(config.policy)
        self._page_size = page_size
        self.index = PrefixIndex(config.max_indexed_pages, resend_s) if config.indexed else None
        self._seats: dict[Role, Seats] = {role: Seats(role, page_size) for role in ("prefill", "decode")}
        self._loads = Loads()
        self._placed: dict[Stamp, _Placed] = {}
        self._turns: Counter[Role] = Counter()
        self._groups: dict[Stamp, str] = {}

    # ------------------------------------------------------------------------------------------ news

    def on_view(self, view: MembershipView) -> None:
        """Who is there now. What was placed on somebody who is not stays counted until it is taken back."""
        alive = {member.stamp for member in view.members}
        self._loads.keep(alive)
        self._seats = {role: self._seats_of(view, role) for role in self._seats}
        self._groups = {one.stamp: one.group for one in view.members if one.role in self._seats}
        if self.index is not None:
            self.index.alive(member.stamp for member in view.members if member.role in self._seats)

    def heard(self, stamp: Stamp, load: Load, now: float) -> list[SendTo]:
        """A heartbeat. It may show that news are missing: then they are asked for."""
        known = self._loads.heard(stamp, load)
        for seats in self._seats.values():
            seats.heard(stamp, known)
        wanted = self.index.wants(stamp, load.kv_seq, now) if self.index is not None else None
        return [] if wanted is None else [SendTo(stamp.worker, stamp.epoch, wanted)]

    def on_kv(self, sender: Stamp, message: KvEvents | KvSnapshot, now: float) -> None:
        """What a worker has cached."""
        if self.index is None:
            return
        if isinstance(message, KvEvents):
            self.index.on_events(sender, message, now)
        else:
            self.index.on_snapshot(sender, message, now)

    def _seats_of(self, view: MembershipView, role: Role) -> Seats:
        members = [one for one in view.members if one.role == role and one.stamp.worker not in view.silent]
        seats = Seats(role, self._page_size, (one.stamp for one in members))
        for one in members:
            if (placed := self._placed.get(one.stamp)) is not None:
                seats.placed(one.stamp, placed.requests, placed.tokens)
            seats.heard(one.stamp, self._loads.of(one))
        return seats

    # --------------------------------------------------------------------------------------- choices

    def names_of(self, prompt: I32) -> tuple[int, ...]:
        """Of its pages, as the index has them; nothing where there is none."""
        return () if self.index is None else tuple(page_names(prompt, self._page_size))

    def place(
        self,
        role: Role,
        prompt: I32,
        draw: int,
        refused_by: Collection[Stamp] = (),
        names: tuple[int, ...] | None = None,
        *,
        group: str | None = None,
    ) -> Placement | None:
        """The worker for a prompt, none of `refused_by`; None when there is no candidate. `draw`: any number that is
        another one for another request; `names`: those of the prompt, where they are known already; `group`: the one
        that it must be of (None: any)."""
        seats = self._seats[role]
        refused_by = [*refused_by, *self._outside(role, group, refused_by)]
        names = self.names_of(prompt) if names is None else names
        cached: tuple[I64, Bools] | None = None
        if self.index is not None:
            pages = np.fromiter(self._matched(self.index, seats.stamps, names), dtype=np.int64, count=len(seats))
            current = np.fromiter(map(self.index.is_current, seats.stamps), dtype=np.bool_, count=len(seats))
            cached = np.minimum(pages * self._page_size, max(0, len(prompt) - 1)), current
        choice = seats.choice(prompt, refused_by, cached, self._turns[role], draw)
        place = self._policy(choice)
        if place is None:
            return None
        assert choice.takes[place], f"the policy chose {seats.stamps[place]}, which cannot take the request"
        self._turns[role] += 1
        tokens = len(prompt) - int(choice.matched[place]) if role == "prefill" else len(prompt)
        return self.put(Placement(seats.stamps[place], tokens, names if role == "prefill" else ()))

    def _outside(self, role: Role, group: str | None, refused_by: Collection[Stamp]) -> list[Stamp]:
        """Whom a request of this group is not given to. One of none yet goes to a decode worker that nobody computes
        prompts for only if there is no other: the rest of its group is still to come, or has left."""
        groups = self._groups
        if group is not None:
            return [stamp for stamp in self._seats[role].stamps if groups[stamp] != group]
        if role == "prefill" or len(set(groups.values())) < 2:
            return []
        seats, whole = self._seats["decode"], {groups[stamp] for stamp in self._seats["prefill"].stamps}
        alone = [stamp for stamp in seats.stamps if groups[stamp] not in whole]
        others = [stamp for stamp in seats.takers if groups[stamp] in whole and stamp not in refused_by]
        return alone if others else []

    def group_of(self, stamp: Stamp) -> str | None:
        """None: it is not there."""
        return self._groups.get(stamp)

    def put(self, placement: Placement) -> Placement:
        """It is there, for a reason of its own or by choice."""
        self._count(placement, 1)
        return placement

    def leave(self, placement: Placement) -> None:
        """It is not there any more, or done."""
        self._count(placement, -1)

    def _count(self, placement: Placement, sign: int) -> None:
        stamp = placement.stamp
        placed = self._placed.setdefault(stamp, _Placed())
        placed.requests += sign
        placed.tokens += sign * placement.tokens
        if sign > 0:
            placed.names.update(placement.names)
        else:
            _take_away(placed.names, placement.names)
        for seats in self._seats.values():
            seats.placed(stamp, placed.requests, placed.tokens)
        if not placed.requests:
            del self._placed[stamp]

    def _matched(self, index: PrefixIndex, stamps: Iterable[Stamp], names: Sequence[int]) -> Iterator[int]:
        """How many of a prompt's first pages each has, or will have."""
        for stamp in stamps:
            placed = self._placed.get(stamp)
            yield max(_held(names, index.names_of(stamp)), _held(names, placed.names) if placed is not None else 0)

    def seats(self, role: Role) -> Seats:
        """Who is there and has been heard."""
        return self._seats[role]

    def index_counts(self) -> IndexCounts:
        """For metrics; nothing where there is no index."""
        return self.index.counts() if self.index is not None else NO_INDEX

    @property
    def policy_failures(self) -> int:
        """Choices that a policy of the user's own failed at."""
        return self._policy.failures if isinstance(self._policy, OwnPolicy) else 0

    @property
    def idle(self) -> bool:
        """Nothing of this gateway's is anywhere."""
        return not self._placed


def _held(names: Sequence[int], have: Container[int]) -> int:
    """How many of the first `names` are had. Whoever has a page has all before it, so most are not asked for."""
    if not names or names[0] not in have:
        return 0
    least, most = 1, len(names)
    while least < most:
        middle = (least + most + 1) // 2
        if names[middle - 1] in have:
            least = middle
        else:
            most = middle - 1
    return least


def _take_away(counts: Counter[int], names: Iterable[int]) -> None:
    for name in names:
        left = counts[name] - 1
        if left:
            counts[name] = left
        else:
            del counts[name]
