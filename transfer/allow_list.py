"""Whom a process believes: which keys may connect to it, and in whose name each of them speaks. Pure.

Owns: the keys of the members, of the controller, and (in a controller) of guests, who may say one thing only: Hello.
Never: a socket, or an opinion on who shall be a member: that is the controller's, and comes with the membership.

A key that is taken off is not believed any more, also over a connection that it opened while it was on the list: each
frame is asked for. So nothing has to be closed in time for it to be safe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from baton.common.ids import CONTROLLER, Stamp, WorkerId
from baton.common.messages import Frame, Hello, Member
from baton.transfer.keys import KeyPair, is_key

MAX_SECRETS = 4096
"""That are remembered: each takes a tenth of a millisecond to compute."""


@dataclass(slots=True)
class _Guest:
    """A process that is expected, and with which key. The first Hello counts; others must say the same."""

    worker: WorkerId
    incarnation: int
    key: str
    introduced: tuple[Stamp, str] | None = None


class AllowList:
    """`own`: the public key of this process; nobody else speaks with it. All is called on one thread but `key_of`,
    which any thread may ask."""

    def __init__(self, own: str = "") -> None:
        self._own = own
        self._stamps: dict[str, Stamp] = {}
        self._keys: dict[Stamp, str] = {}
        self._controller = ""
        self._guests: dict[str, _Guest] = {}
        self._guest_of: dict[WorkerId, str] = {}

    def set_members(self, members: Iterable[Member]) -> None:
        """These, and nobody else any more."""
        keys = {member.stamp: member.key for member in members if member.key}
        self._stamps = {key: stamp for stamp, key in keys.items()}
        self._keys = keys

    def set_controller(self, key: str) -> None:
        """The one that is listened to."""
        self._controller = key

    def invite(self, key: str, worker: WorkerId, incarnation: int) -> None:
        """Whoever has `key` may say Hello for this process. An earlier guest of that seat may not any more."""
        earlier = self._guest_of.get(worker)
        if earlier is not None:
            del self._guests[earlier]
        self._guests[key] = _Guest(worker, incarnation, key)
        self._guest_of[worker] = key

    def withdraw(self, worker: WorkerId, incarnation: int) -> None:
        """This process has been let in, or is not wanted any more. No guest is fine."""
        key = self._guest_of.get(worker)
        if key is not None and self._guests[key].incarnation == incarnation:
            del self._guest_of[worker], self._guests[key]

    def knows(self, key: str) -> bool:
        """Whether a connection with this key is let in."""
        return bool(key) and (key in self._stamps or key == self._controller or key in self._guests)

    def speaks_for(self, key: str, stamp: Stamp) -> bool:
        """Whether `key` is that of the very process."""
        return self._stamps.get(key) == stamp

    def believes(self, key: str, frame: Frame) -> bool:
        """Whether who has `key` may say this, in that name."""
        if self._stamps.get(key) == frame.src:
            return True
        if key and key == self._controller:
            return frame.src.worker == CONTROLLER
        guest = self._guests.get(key)
        return guest is not None and isinstance(frame.body, Hello) and self._introduces(guest, frame.src, frame.body)

    def key_of(self, stamp: Stamp) -> str:
        """Of a member; "" for all others."""
        return self._keys.get(stamp, "")

    def _introduces(self, guest: _Guest, src: Stamp, hello: Hello) -> bool:
        key = hello.member.key
        if (src.worker, src.incarnation) != (guest.worker, guest.incarnation) or hello.member.stamp != src:
            return False
        if guest.introduced is None:
            if self._is_taken(key, guest) or not is_key(key):
                return False
            guest.introduced = (src, key)
        return guest.introduced == (src, key)

    def _is_taken(self, key: str, guest: _Guest) -> bool:
        """By somebody else: who copies a public key cannot speak with it, but would take its name from its owner."""
        others = (other for other in self._guests.values() if other is not guest)
        taken = any(key == other.key or (other.introduced or ("", ""))[1] == key for other in others)
        return taken or key in (self._own, self._controller) or key in self._stamps


class PairSecrets:
    """What this process shares with each member, for lanes that CURVE does not guard. Asked from any thread."""

    def __init__(self, keys: KeyPair | None, allow: AllowList) -> None:
        self._pair = keys
        self._allow = allow
        self._known: dict[tuple[str, str], bytes] = {}

    def of(self, purpose: str) -> Callable[[Stamp], bytes | None]:
        """What this process and a member share for `purpose`. None: it is not a member, or not any more. Without keys
        everybody has the same one."""
        return partial(self._with, purpose)

    def _with(self, purpose: str, peer: Stamp) -> bytes | None:
        if self._pair is None:
            return b""
        key = self._allow.key_of(peer)
        if not key:
            return None
        found = self._known.get((key, purpose))
        if found is None:
            found = self._pair.shared_with(key, purpose)
            if len(self._known) >= MAX_SECRETS:
                self._known.clear()
            self._known[key, purpose] = found
        return found
