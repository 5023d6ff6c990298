"""The plan of a cluster as it shall be, from the one that it is."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import cast

import pytest

from baton.common.config import ClusterConfig, GatewayConfig
from baton.common.errors import ConfigError
from baton.deploy.changing import added, changed_settings, plan_upgrade, scale, upgrade
from baton.deploy.cluster_plan import ClusterPlan, Place, PlannedSeat
from baton.deploy.controller_seats import SeatSpec, SeatStatus
from baton.deploy.launch import CLASS_PATHS, ClusterHandle
from baton.deploy.ray_join import cpus_of_own_ray, tell_room
from baton.deploy.seat_book import SeatBook


@dataclass
class Handle:
    """What `changing` asks of a cluster; `roles` are those that workers have come to have."""

    plan: ClusterPlan
    roles: dict[str, str] = field(default_factory=dict)
    leaving: str = ""

    def current_plan(self) -> ClusterPlan:
        return self.plan

    def status(self) -> SimpleNamespace:
        seats = [
            SeatStatus(
                name, self.roles.get(name, seat.spec.role), "leaving" if name == self.leaving else "live", 1, "", 0
            )
            for seat in self.plan.seats
            for name in [seat.spec.worker]
        ]
        return SimpleNamespace(seats=seats)

    def change(self, plan: ClusterPlan) -> None:
        self.plan = plan


def cluster(prefill: int = 1, decode: int = 2, **roles: str) -> ClusterHandle:
    names = [*(f"prefill-{n}" for n in range(prefill)), *(f"decode-{n}" for n in range(decode)), "gateway-0"]
    config = ClusterConfig(prefill=prefill, decode=decode, pin_cores=False, gateway=GatewayConfig(port=8123))
    plan = ClusterPlan(
        config=config,
        run_dir="/nowhere",
        seats=tuple(PlannedSeat(spec=SeatSpec(name, name.split("-")[0]), cores=(), place=Place()) for name in names),  # type: ignore[arg-type]
        class_paths=CLASS_PATHS,
        launched_at_ms=0,
    )
    return cast(ClusterHandle, Handle(plan, {name.replace("_", "-"): role for name, role in roles.items()}))


def names(plan: ClusterPlan) -> list[str]:
    return sorted(seat.spec.worker for seat in plan.seats)


def test_more_workers_have_names_that_nobody_has_and_fewer_lose_the_last() -> None:
    handle = cluster()
    plan = scale(handle, {"decode": 4, "prefill": 2})
    assert names(plan) == ["decode-0", "decode-1", "decode-2", "decode-3", "gateway-0", "prefill-0", "prefill-1"]
    assert (plan.config.prefill, plan.config.decode) == (2, 4)
    assert names(scale(handle, {"decode": 1})) == ["decode-0", "gateway-0", "prefill-0", "prefill-1"]


def test_roles_are_those_that_workers_have_come_to_have() -> None:
    handle = cluster(prefill=1, decode=3, decode_2="prefill")
    assert names(scale(handle, {"prefill": 1})) == ["decode-0", "decode-1", "gateway-0", "prefill-0"]


@pytest.mark.parametrize("wanted", [{"decode": 0}, {"gateway": 2}])
def test_what_cannot_be_is_refused(wanted: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        scale(cluster(), wanted)


def test_an_upgrade_wants_all_anew_and_some_beside_them_and_keeps_the_way_back() -> None:
    handle = cluster(prefill=1, decode=2)
    before = handle.current_plan()
    plan = upgrade(handle, replace(before.config, prefill=7, kv=replace(before.config.kv, page_size=32)))
    assert {seat.spec.worker for seat in plan.seats if seat.spec.extra} == {"decode-2", "prefill-1"}
    assert {seat.spec.revision for seat in plan.seats} == {plan.revision} == {2}
    assert plan.settings(1).config == before.config
    assert plan.settings(2).config.kv.page_size == 32
    assert plan.config.prefill == 1, "how many there are is another question"
    again = upgrade(handle, before.config, surge=0)
    assert [seat.spec.role for seat in again.seats if seat.spec.extra] == ["prefill"]
    assert len(again.seats) == len(before.seats) + 1


def test_who_scales_when_an_upgrade_was_given_up_has_more_of_the_revision_that_serves() -> None:
    handle = cluster(prefill=2, decode=2)
    before = handle.current_plan()
    failed = upgrade(handle, replace(before.config, kv=replace(before.config.kv, page_size=32)))
    meanwhile = scale(handle, {"decode": 3})
    assert {seat.spec.fallback for seat in meanwhile.lasting} == {1}, "so is who was asked for meanwhile"
    book = SeatBook([seat.spec for seat in meanwhile.seats], 0.0)
    book.give_up_upgrade(failed.revision, "decode-2 did not come up")
    kept = book.keep()
    assert kept is not None
    handle.change(meanwhile.after(kept))
    plan = scale(handle, {"decode": 4})
    assert {seat.spec.revision for seat in plan.seats} == {plan.revision} == {1}
    assert (plan.config, plan.class_paths) == (replace(before.config, decode=4), before.class_paths)
    assert plan.halted == "revision 2 was given up: decode-2 did not come up; revision 1 serves"
    again = plan_upgrade(handle, before.config)
    assert (again.revision, again.halted) == (3, ""), "no number is given twice"


def test_who_leaves_for_another_role_is_nobody_that_an_upgrade_may_count_on() -> None:
    handle = cluster(prefill=2, decode=2)
    cast(Handle, handle).leaving = "prefill-1"
    plan = plan_upgrade(handle, handle.current_plan().config, surge=0)
    assert [seat.spec.worker for seat in plan.seats if seat.spec.extra] == ["prefill-2"]


def test_who_scales_while_an_upgrade_goes_on_leaves_it_its_extra_workers() -> None:
    """The last worker of a role is only replaced while another one answers."""
    handle = cluster(prefill=1, decode=1)
    extra = {seat.spec.worker for seat in upgrade(handle, handle.current_plan().config).seats if seat.spec.extra}
    plan = scale(handle, {"decode": 2})
    assert {seat.spec.worker for seat in plan.seats if seat.spec.extra} == extra == {"decode-1", "prefill-1"}
    assert names(plan) == ["decode-0", "decode-1", "decode-2", "gateway-0", "prefill-0", "prefill-1"]
    assert (plan.config.prefill, plan.config.decode) == (1, 2), "they are not counted"


def test_an_upgrade_says_what_changes_and_what_is_forgotten_before_it_begins() -> None:
    handle = cluster(prefill=1, decode=2)
    config = handle.current_plan().config
    decode_worker = replace(config.decode_worker, chunk_tokens=1024)
    upgrade(handle, replace(config, decode_worker=decode_worker, kv=replace(config.kv, page_size=32)))
    before = handle.current_plan()
    later = plan_upgrade(handle, replace(config, kv=replace(config.kv, page_size=64)))
    usual = config.decode_worker.chunk_tokens
    assert changed_settings(before, later) == [
        "kv.page_size: 32 -> 64",
        f"decode_worker.chunk_tokens: 1024 -> {usual} (the default)",
    ]
    assert changed_settings(before, plan_upgrade(handle, before.config)) == []
    assert handle.current_plan() == before, "nothing has begun"


def test_an_upgrade_keeps_where_clients_find_it() -> None:
    handle = cluster()
    config = handle.current_plan().config
    with pytest.raises(ConfigError, match=r"gateway\.port"):
        upgrade(handle, replace(config, gateway=replace(config.gateway, port=1)))


def test_who_asks_for_more_than_ray_has_room_for_is_told_so() -> None:
    handle, said = cluster(), list[str]()
    before = handle.current_plan()
    places = [replace(seat, place=Place(num_cpus=seat.spec.role != "gateway")) for seat in before.seats]
    handle.change(replace(before, seats=tuple(places)))
    before = handle.current_plan()
    more = added(before, upgrade(handle, before.config))
    assert [seat.spec.worker for seat in more] == ["decode-2", "prefill-1"]
    tell_room(2, more, said.append)
    assert said == []
    tell_room(1, more, said.append)
    assert said == ["Ray has 1 free CPUs; 2 workers wait for 2"]
    said.clear()
    tell_room(0, added(handle.current_plan(), scale(handle, {"decode": 1})), said.append)
    assert said == []


def test_a_ray_of_our_own_has_room_for_the_extra_workers_of_an_upgrade() -> None:
    for prefill, decode in ((0, 1), (1, 1), (1, 2), (3, 1)):
        handle = cluster(prefill, decode)
        before = handle.current_plan()
        extra = added(before, upgrade(handle, before.config))
        assert cpus_of_own_ray(prefill + decode, cores=1) >= prefill + decode + len(extra)
