"""Autoscaling at the controller's side: gateways count, heartbeats tell, and the core is asked to replace a worker."""

from __future__ import annotations

import pytest
from msgspec import structs
from planner_rig import COST

from baton.common.config import AutoscaleConfig, ClusterConfig, LivenessConfig
from baton.common.config_checks import validate
from baton.common.errors import ConfigError
from baton.common.ids import Epoch, Stamp, WorkerId
from baton.common.messages import PROTOCOL_VERSION, Demand, Heartbeat, Hello, Load, Member, Timeline
from baton.deploy.autoscale import Policy
from baton.deploy.autoscale_control import LOOK_S, AutoscaleControl
from baton.deploy.controller_core import ControllerCore
from baton.deploy.controller_seats import DrainWorker, Effect, SeatSpec
from baton.deploy.demand import DemandMeter, DemandSum
from baton.deploy.planner.outcome import Slo

ROLES = {"prefill-0": "prefill", "decode-0": "decode", "decode-1": "decode", "gateway-0": "gateway"}
POLICY = Policy(cost=COST, slo=Slo(ttft_s=2.0, itl_s=0.05), workers=3, restart_s=5.0)
GATEWAYS = [Stamp(WorkerId("gateway-0"), incarnation, Epoch(9 + incarnation)) for incarnation in (1, 2)]


def test_a_meter_counts_what_was_asked_for_and_what_came_of_it() -> None:
    meter = DemandMeter()
    meter.asked(10)
    meter.asked(4)
    meter.answered(10, 3, Timeline(transferred_tokens=8, prefill_cached_tokens=6))
    meter.answered(4, 1, None)
    meter.said += 9
    expected = {
        "requests": 2,
        "tokens": 14,
        "squares": 116,
        "ended": 2,
        "outputs": 4,
        "said": 9,
        "prompts": 14,
        "computed": 6,
    }
    assert structs.asdict(meter.total) == expected


def test_a_gateway_that_begins_anew_takes_nothing_away() -> None:
    demand = DemandSum()
    first, second = GATEWAYS
    assert demand.heard({first: Demand(requests=5)}).requests == 5
    assert demand.heard({}).requests == 5
    assert demand.heard({second: Demand(requests=1)}).requests == 6
    assert demand.heard({second: Demand(requests=3)}).requests == 8


def live_core() -> ControllerCore:
    seats = [SeatSpec(WorkerId(name), role) for name, role in ROLES.items()]
    core = ControllerCore(seats, LivenessConfig(), first_version=1, now=0.0)
    core.on_timer(0.0)
    for name, role in ROLES.items():
        member = Member(stamp=Stamp(WorkerId(name), 1, Epoch(10)), role=role, address="tcp://127.0.0.1:1")
        core.on_message(member.stamp, Hello(protocol_version=PROTOCOL_VERSION, member=member), 0.0)
    assert core.ready
    return core


def asked_under_pressure(core: ControllerCore) -> list[Effect]:
    """Prompts come too fast for a minute."""
    control, meter = AutoscaleControl(POLICY, 0.0), DemandMeter()
    asked: list[Effect] = []
    for second in range(60):
        for _ in range(15):  # of a tenth of a second each
            meter.asked(1000)
            meter.answered(1000, 10, None)
        for name in ROLES:
            load = Load(demand=meter.total) if name == "gateway-0" else Load(running=3 if name == "decode-0" else 1)
            core.on_message(Stamp(WorkerId(name), 1, Epoch(10)), Heartbeat(load=load), float(second))
        effects, flips = control.look(core, float(second))
        asked += effects
        assert len(flips) == len(effects)
        assert control.look(core, second + LOOK_S / 2) == ([], ()), "before the next look is due"
    return asked


def test_a_worker_is_asked_to_leave_for_the_other_role_when_prompts_come_too_fast() -> None:
    asked = asked_under_pressure(live_core())
    assert [(one.worker, one.incarnation) for one in asked if isinstance(one, DrainWorker)] == [("decode-1", 1)]
    assert len(asked) == 1, "one change at a time"


def test_nobody_is_asked_while_the_cluster_changes() -> None:
    core = live_core()
    core.book.seats[WorkerId("decode-0")].proven = None  # its revision is still to show that it comes up
    assert asked_under_pressure(core) == []


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (ClusterConfig(autoscale=AutoscaleConfig(min_decode=0)), "autoscale.min_decode"),
        (ClusterConfig(prefill=0, autoscale=AutoscaleConfig(cost_file="costs.json")), "autoscale.min_prefill"),
        (ClusterConfig(autoscale=AutoscaleConfig(dwell_s=0.0)), "autoscale.dwell_s"),
    ],
)
def test_settings_that_cannot_work_are_named(config: ClusterConfig, field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        validate(config)
