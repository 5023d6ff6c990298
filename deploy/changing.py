"""A running cluster becomes another one: `baton scale` and `baton upgrade`.

Owns: the plan of the cluster as it shall be, from the one that it is, and what a person sees meanwhile. Never: starts
or ends a process: the controller works the plan off, one process at a time, also when nobody watches.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Mapping

from baton.common.clock import MonotonicClock
from baton.common.config import ClusterConfig
from baton.common.config_checks import validate
from baton.common.errors import ConfigError
from baton.common.ids import WorkerId
from baton.common.model.cache import Progress, silent
from baton.common.resolve import differences, flat
from baton.deploy.cluster_plan import ClusterPlan, ControllerStatus, PlannedSeat, Settings, place_of
from baton.deploy.controller_seats import COMPUTE_ROLES, SeatSpec, SeatStatus
from baton.deploy.launch import ClusterHandle, LaunchError, cores_for, policy_of

SAME = ("cluster", "gateways", "gateway.host", "gateway.port", "model.model")
"""What an upgrade does not change: where clients find it, and under which name."""
LOOK_S = 1.0


def scale(handle: ClusterHandle, wanted: Mapping[str, int]) -> ClusterPlan:
    """So many workers of these roles, from now on. Those that are added have the settings of the others; of those that
    are there, the last ones leave when they have finished what they have. The extra ones of an upgrade that goes on
    stay as long as it does. Raises ConfigError."""
    plan, seats = handle.current_plan(), handle.status().seats
    for role, count in wanted.items():
        if role not in COMPUTE_ROLES:
            raise ConfigError("role", role, f"is none of {', '.join(sorted(COMPUTE_ROLES))}")
        if count < 1:
            raise ConfigError(role, count, "the last worker of a role stays", "1, or more")
    kept = list(plan.lasting)
    for role, count in wanted.items():
        there = [seat for seat in kept if _role_of(seat, seats) == role]
        leaving = sorted(there, key=lambda seat: _is_live(seat.spec.worker, seats), reverse=True)[count:]
        kept = [seat for seat in kept if seat not in leaving]
        kept += _more(plan, role, count - len(there), kept)
    roles = [_role_of(seat, seats) for seat in kept]
    config = dataclasses.replace(plan.config, prefill=roles.count("prefill"), decode=roles.count("decode"))
    validate(config)
    extra = [seat for seat in plan.seats if seat.spec.extra]
    changed = dataclasses.replace(plan, config=config, seats=(*kept, *extra), policy=policy_of(config))
    handle.change(changed)
    return changed


def upgrade(
    handle: ClusterHandle,
    config: ClusterConfig,
    *,
    surge: int = 1,
    class_paths: Mapping[str, str] | None = None,
) -> ClusterPlan:
    """All processes are replaced by such with these settings, and of the release that is installed on their nodes.
    Raises ConfigError."""
    later = plan_upgrade(handle, config, surge=surge, class_paths=class_paths)
    handle.change(later)
    return later


def plan_upgrade(
    handle: ClusterHandle,
    config: ClusterConfig,
    *,
    surge: int = 1,
    class_paths: Mapping[str, str] | None = None,
) -> ClusterPlan:
    """What `upgrade` makes of the cluster; nothing begins. Meanwhile there are `surge` decode workers more, and one
    prefill worker more where only one takes requests. Raises ConfigError."""
    plan, seats = handle.current_plan(), handle.status().seats
    config = dataclasses.replace(config, prefill=plan.config.prefill, decode=plan.config.decode)
    if not config.gateway.port:
        config = dataclasses.replace(config, gateway=dataclasses.replace(config.gateway, port=plan.config.gateway.port))
    for name in SAME:
        if (wanted := _value(config, name)) != _value(plan.config, name):
            reason = f"the cluster runs with {_value(plan.config, name)!r}, and an upgrade keeps that"
            raise ConfigError(name, wanted, reason, "baton deploy --replace, or a cluster of another name")
    validate(config)
    revision = plan.next_revision
    kept = plan.lasting
    anew = [dataclasses.replace(seat, spec=_anew(seat.spec, revision)) for seat in kept]
    later = dataclasses.replace(
        plan,
        config=config,
        class_paths=dict(class_paths or plan.class_paths),
        revision=revision,
        before={**plan.before, plan.revision: Settings(plan.config, plan.class_paths, plan.policy)},
        policy=policy_of(config),
        given_up=None,
    )
    for role, count in (("decode", surge), ("prefill", 1)):
        there = [seat for seat in kept if _role_of(seat, seats) == role]
        able = sum(_is_live(seat.spec.worker, seats) for seat in there)
        more = max(count, 1) if there and able <= 1 else count if role == "decode" else 0
        anew += [
            dataclasses.replace(seat, spec=dataclasses.replace(seat.spec, extra=True, fallback=0))
            for seat in _more(later, role, more, anew)
        ]
    return dataclasses.replace(later, seats=tuple(anew))


def changed_settings(before: ClusterPlan, after: ClusterPlan) -> list[str]:
    """A line for each setting that becomes another one."""
    usual = dict(flat(dataclasses.asdict(ClusterConfig())))
    return [
        f"{name}: {old} -> {new}{' (the default)' if new == usual.get(name) else ''}"
        for name, (old, new) in differences(before.config, after.config).items()
    ]


def added(before: ClusterPlan, after: ClusterPlan) -> list[PlannedSeat]:
    """Those that start beside whoever is there."""
    there = {seat.spec.worker for seat in before.seats}
    return [seat for seat in after.seats if seat.spec.worker not in there]


def watch(handle: ClusterHandle, within_s: float, on_progress: Progress = silent, upgrade_to: int = 0) -> str:
    """Until the cluster is as it was told to be: "", or why the upgrade to this revision was given up. Raises
    LaunchError when that takes longer."""
    clock = MonotonicClock()
    deadline_s = clock.now() + within_s
    shown: dict[WorkerId, str] = {}
    status = handle.status()
    while status.changing or not status.ready:
        if upgrade_to and status.given_up == upgrade_to and not status.changing:
            return status.halted
        if clock.now() >= deadline_s:
            raise LaunchError(f"not done within {within_s:g} s: {', '.join(map(_told, _unfinished(status)))}")
        for seat in status.seats:
            if shown.get(seat.worker) != (line := _told(seat)):
                shown[seat.worker] = line
                on_progress(line)
        with contextlib.suppress(LaunchError):  # a controller that is being restarted is asked again
            status = handle.wait_change(status, LOOK_S)
    return status.halted if upgrade_to and status.given_up == upgrade_to else ""


def _unfinished(status: ControllerStatus) -> list[SeatStatus]:
    newest = max((seat.revision for seat in status.seats), default=1)
    return [seat for seat in status.seats if seat.state != "live" or seat.revision != newest]


def _told(seat: SeatStatus) -> str:
    why = "" if seat.state == "live" or not seat.detail else f" ({seat.detail})"
    apart = ", ".join(f"{name}: {values}" for name, values in seat.differs.items())
    return f"{seat.worker}@{seat.incarnation}, revision {seat.revision}: {seat.state}{why}" + (
        f"; a group of its own, {apart}" if apart else ""
    )


def _more(plan: ClusterPlan, role: str, count: int, there: Iterable[PlannedSeat]) -> list[PlannedSeat]:
    """Seats with names that nobody has."""
    taken = {seat.spec.worker for seat in there} | {seat.spec.worker for seat in plan.seats}
    found: list[PlannedSeat] = []
    number = 0
    cores = cores_for(len(taken) + max(0, count))
    fallback = max((seat.spec.fallback for seat in plan.lasting), default=0)
    while len(found) < count:
        worker = WorkerId(f"{role}-{number}")
        if worker not in taken:
            spec = SeatSpec(worker, role, plan.revision, fallback=fallback)
            place = place_of(role, plan.config.placement)
            found.append(PlannedSeat(spec=spec, cores=cores[len(taken) + len(found)], place=place))
        number += 1
    return found


def _anew(spec: SeatSpec, revision: int) -> SeatSpec:
    """Where an upgrade is not over, what came before it is still what is known to come up."""
    return dataclasses.replace(spec, revision=revision, fallback=spec.fallback or spec.revision)


def _role_of(seat: PlannedSeat, seats: Iterable[SeatStatus]) -> str:
    """That it has now: workers change it."""
    return next((one.role for one in seats if one.worker == seat.spec.worker), seat.spec.role)


def _is_live(worker: WorkerId, seats: Iterable[SeatStatus]) -> bool:
    return any(one.worker == worker and one.state == "live" for one in seats)


def _value(config: ClusterConfig, name: str) -> object:
    found: object = config
    for part in name.split("."):
        found = getattr(found, part)
    return found
