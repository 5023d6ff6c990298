"""The named scenarios, by name."""

from __future__ import annotations

from collections.abc import Callable

from baton.deploy.sim import scenarios_flips as flips
from baton.deploy.sim import scenarios_kept as kept
from baton.deploy.sim import scenarios_keys as keys
from baton.deploy.sim import scenarios_liveness as liveness
from baton.deploy.sim import scenarios_memory as memory
from baton.deploy.sim import scenarios_output as output
from baton.deploy.sim import scenarios_peers as peers
from baton.deploy.sim import scenarios_pressure as pressure
from baton.deploy.sim import scenarios_resume as resume
from baton.deploy.sim import scenarios_sessions as sessions
from baton.deploy.sim import scenarios_tickets as tickets
from baton.deploy.sim import scenarios_upgrades as upgrades
from baton.deploy.sim import scenarios_views as views
from baton.deploy.sim.plan import Scenario
from baton.deploy.sim.world import Report

SCENARIOS: dict[str, Callable[[int], Scenario]] = {
    one.__name__: one
    for one in (
        memory.abort_mid_write,
        memory.sink_stopped_while_pulling,
        memory.sink_resumes_after_silence,
        memory.prealloc_fills_pool,
        memory.decode_radix_abort,
        memory.abort_mid_restore,
        memory.retracted_while_copied,
        memory.out_of_time_while_copied,
        liveness.cancel_before_offer,
        liveness.cancel_before_submit,
        liveness.source_crash,
        liveness.sink_crash,
        liveness.source_goes_silent,
        liveness.late_success_after_fail,
        liveness.restart_same_address,
        liveness.first_token_disconnect,
        liveness.lost_control_frame,
        liveness.gateway_lost,
        liveness.retry_same_room,
        liveness.request_lost_under_churn,
        liveness.source_crash_after_release,
        views.missed_a_view,
        views.seat_that_keeps_dying,
        *kept.SCENARIOS,
        *sessions.SCENARIOS,
        *pressure.SCENARIOS,
        *peers.SCENARIOS,
        *output.SCENARIOS,
        *flips.SCENARIOS,
        *upgrades.SCENARIOS,
        *keys.SCENARIOS,
        *tickets.SCENARIOS,
        resume.sink_crash_mid_prompt,
        resume.conversation_comes_back,
        resume.session_that_was_edited,
        resume.crash_mid_return,
        resume.returns_under_churn,
        sessions.session_goes_back_a_little,
    )
}


def run_scenario(name: str, seed: int) -> Report:
    """Raises AssertionError when something is wrong, DangerMissed when nothing was put to the test."""
    scenario = SCENARIOS[name](seed)
    report = scenario.world.run()
    scenario.reached(report)
    return report
