"""Who is there, as a decode core sees it: gateways that may be lost, prefill workers to ask. Owns the latest view."""

from __future__ import annotations

from baton.common.compat import NO_GROUP
from baton.common.engine.core_api import MembershipView, group_in
from baton.common.engine.policy import affinity_key, rendezvous_order
from baton.common.ids import Stamp, WorkerId
from baton.common.messages import Member
from baton.decode.request import DecodeRequest


class Peers:
    """Answers from the newest view; older ones are ignored."""

    def __init__(self, stamp: Stamp) -> None:
        self._stamp = stamp
        self._group = NO_GROUP
        self._version = 0
        self._members: dict[WorkerId, Member] = {}
        self._silent: frozenset[WorkerId] = frozenset()
        self._gone: dict[WorkerId, int] = {}  # highest incarnation of a seat that is proven dead

    def update(self, view: MembershipView) -> bool:
        """False: an old view."""
        if view.version < self._version:
            return False
        alive = {member.stamp for member in view.members}
        for member in self._members.values():
            if member.stamp not in alive:
                seat = member.stamp.worker
                self._gone[seat] = max(member.stamp.incarnation, self._gone.get(seat, 0))
        self._version = view.version
        self._members = {member.stamp.worker: member for member in view.members}
        self._silent = view.silent
        self._group = group_in(view, self._stamp)
        return True

    def is_gone(self, stamp: Stamp) -> bool:
        """Proven dead. A process that no view has listed yet is not."""
        return stamp.incarnation <= self._gone.get(stamp.worker, 0)

    def is_silent(self, stamp: Stamp) -> bool:
        return stamp.worker in self._silent

    def prefill_for(self, request: DecodeRequest) -> Stamp | None:
        """The router's choice while it is there, else the one that likely has the prompt's beginning cached; nobody who
        has failed this request already."""
        preferred = self._members.get(request.preferred) if request.preferred is not None else None
        if preferred is not None and self._can_fill(request, preferred):
            return preferred.stamp
        candidates = [worker for worker, member in self._members.items() if self._can_fill(request, member)]
        order = rendezvous_order(affinity_key(request.prompt), candidates)
        return self._members[order[0]].stamp if order else None

    def _can_fill(self, request: DecodeRequest, member: Member) -> bool:
        silent = member.stamp.worker in self._silent
        alike = member.role == "prefill" and member.group == self._group
        return alike and not silent and member.stamp not in request.tried
