"""Who is believed to be there, and what is asked of whom: oracles over rosters, controllers, engines and gateways.

Own what each was told, and what became of it. A worker too many or too few in somebody's view is seldom seen in an
answer: others take its work. So the views themselves are looked at.

- V1  Versions only grow, also over controllers; one version is one list. What is proven dead stays dead.
- V2  Who was published stays published until it is dead. Nobody is killed, or called silent, who gave no cause: what
      happened to the process that says so is none.
- V3  Nobody is asked for work whom the asker has been told to be silent or gone.
- V4  A gateway repeats what is not answered, not sooner than `resend_after_s`; it asks whether a placement is still
      there when that has said nothing for long. Where nothing is lost or late, it need not repeat a Submit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from baton.common.engine.core_api import FromPeer, MembershipView, SendTo
from baton.common.ids import RequestId, Stamp, WorkerId
from baton.common.messages import CancelRequest, Membership, Output, Resume, Submit, Submitted
from baton.deploy.gateway_states import RequestEnded

ROUNDING_S = 1e-6
QUIET_RESENDS = 8


class ViewWatch:
    """What one process has been told of the others (V1, V3)."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._version = 0
        self._listed: set[Stamp] = set()
        self._gone: set[Stamp] = set()
        self._epochs: dict[WorkerId, int] = {}
        self._able: set[WorkerId] = set()

    def told(self, view: MembershipView) -> None:
        assert view.version >= self._version, f"{self._name} goes back from view {self._version} to {view.version}"
        listed = {member.stamp for member in view.members}
        if listed != self._listed:
            self._gone |= self._listed - listed
            risen = self._gone & listed
            assert not risen, f"{self._name} takes {risen} for alive again"
            self._epochs = {stamp.worker: stamp.epoch for stamp in listed}
        self._version, self._listed = view.version, listed
        self._able = {stamp.worker for stamp in listed} - view.silent

    def epoch_of(self, worker: WorkerId) -> int:
        """Of whoever is there, as far as it was told."""
        return self._epochs[worker]

    def asks(self, worker: WorkerId, epoch: int = 0) -> None:
        """For work."""
        assert worker in self._able, f"{self._name} asks {worker}, which is not there or says nothing"
        assert epoch in (0, self._epochs[worker]), f"{self._name} asks a predecessor of {worker}"


class PublicationWatch:
    """What all controllers of a world have published (V1, V2). `is_alive`: the process of that stamp."""

    def __init__(self, is_alive: Callable[[Stamp], bool]) -> None:
        self._is_alive = is_alive
        self._last = Membership(version=0, members=())
        self._heard: dict[Stamp, set[Stamp]] = {}
        self._suspects: set[WorkerId] = set()

    def published(self, membership: Membership) -> None:
        last = self._last
        assert membership.version >= last.version, f"version {membership.version} after {last.version}"
        now = {member.stamp for member in membership.members}
        before = {member.stamp for member in last.members}
        assert membership.version > last.version or now == before, f"two views of version {membership.version}"
        missing = [stamp for stamp in before - now if self._is_alive(stamp) and self._is_known(stamp)]
        assert not missing, f"{missing} are alive, and published no more"
        self._last = membership

    def is_sound(self, worker: WorkerId) -> bool:
        """Nothing has happened to it."""
        return worker not in self._suspects

    def heard(self, by: Stamp, membership: Membership) -> None:
        """What nobody has heard who lives was never said: it binds no successor of its controller."""
        self._heard[by] = {member.stamp for member in membership.members}

    def _is_known(self, stamp: Stamp) -> bool:
        return any(stamp in listed and self._is_alive(by) for by, listed in self._heard.items())

    def suspect(self, *workers: WorkerId) -> None:
        """Something has happened to them that may look like death from outside."""
        self._suspects.update(workers)

    def kills(self, stamp: Stamp) -> None:
        known = stamp.worker in self._suspects or not self._is_alive(stamp)
        assert known, f"{stamp} is killed, and nothing was wrong with it"


class GatewayWatch:
    """What one gateway says to decode workers, and when (V3, V4)."""

    def __init__(self, name: str, resend_after_s: float, is_prompt: Callable[[], bool]) -> None:
        self._name = name
        self._resend_after_s = resend_after_s
        self._is_prompt = is_prompt
        self.view = ViewWatch(name)
        self._placed: dict[RequestId, tuple[int, int]] = {}  # -> epoch of the worker, placement
        self._heard_s: dict[RequestId, float] = {}
        self._said_s: dict[tuple[type[object], RequestId, int], float] = {}

    def hears(self, event: FromPeer, now: float) -> None:
        body = event.body
        if not isinstance(body, Submitted | Output):
            return
        if self._placed.get(body.request_id) == (event.sender.epoch, body.placement):
            self._heard_s[body.request_id] = now

    def says(self, effects: Iterable[object], now: float, *, on_timer: bool) -> None:
        for effect in effects:
            if isinstance(effect, RequestEnded):
                self._heard_s.pop(effect.request_id, None)
                self._placed.pop(effect.request_id, None)
            elif isinstance(effect, SendTo):
                match effect.body:
                    case Submit() as submit:
                        self.view.asks(effect.worker, effect.epoch)
                        known = self._placed.get(submit.request_id)
                        self._placed[submit.request_id] = effect.epoch, submit.placement
                        if on_timer and known == (effect.epoch, submit.placement):
                            assert not self._is_prompt(), f"{self._name} has to submit {submit.request_id} again"
                            self._again(submit, now)
                    case CancelRequest() as cancel if on_timer:
                        self._again(cancel, now)
                    case Resume(request_id=request_id) if on_timer:
                        quiet_s = now - self._heard_s.get(request_id, now)
                        long = quiet_s >= QUIET_RESENDS * self._resend_after_s - ROUNDING_S
                        assert long, f"{self._name} doubts {request_id}, heard {quiet_s:.3f} s ago"
                    case _:
                        pass

    def _again(self, body: Submit | CancelRequest, now: float) -> None:
        what = type(body), body.request_id, body.placement
        said_s = self._said_s.get(what)
        soon = said_s is not None and now - said_s < self._resend_after_s - ROUNDING_S
        assert not soon, f"{self._name} repeats {body} too soon"
        self._said_s[what] = now
