"""What is wrong with a cluster that runs, by what its gateway tells. Owns those findings; never asks anybody else."""

from __future__ import annotations

from collections.abc import Iterator

from baton.common.errors import BatonError
from baton.deploy.client import Client
from baton.deploy.doctor.findings import Finding, Severity
from baton.deploy.show import unaccounted
from baton.deploy.show_parts import account_of
from baton.deploy.status import GatewayStatus

STUCK_S = 30.0
CLEARLY_FASTER = 1.5


def examine_gateway(url: str) -> Iterator[Finding]:
    """What the one at this address tells."""
    try:
        with Client(url, timeout_s=15.0) as client:
            yield from findings_of(client.status())
    except BatonError as error:
        yield Finding("cluster", Severity.FAIL, str(error))


def findings_of(status: GatewayStatus) -> Iterator[Finding]:
    """Of what a gateway tells. Pure."""
    yield _readiness(status)
    yield from _workers(status)
    yield from _pages(status)
    yield from _lanes_in_use(status)


def _readiness(status: GatewayStatus) -> Finding:
    value = (
        f"{status.model}, baton {status.version}: {status.requests.running} running, {status.requests.queued} waiting"
    )
    if status.ready:
        return Finding("cluster", Severity.OK, value)
    return Finding("cluster", Severity.FAIL, f"{value}; not ready: {status.reason}", "baton status shows its workers")


def _workers(status: GatewayStatus) -> Iterator[Finding]:
    for worker in status.workers:
        if worker.silent:
            way_out = "the controller replaces it once its process is proven dead; if it hangs, kill it"
            yield Finding(worker.worker, Severity.FAIL, "is silent", way_out)
        elif worker.load.step_age_s > STUCK_S:
            value = f"has been in one step for {worker.load.step_age_s:.0f} s"
            yield Finding(worker.worker, Severity.FAIL, value, "py-spy dump shows where; killing it costs no answer")
        elif worker.incarnation > 1:
            value = f"is process number {worker.incarnation} in its seat"
            yield Finding(worker.worker, Severity.WARN, value, "look for why the ones before ended")
    if not any(worker.role == "prefill" for worker in status.workers):
        yield Finding("prefill", Severity.WARN, "no worker: decode workers compute prompts themselves")


def _pages(status: GatewayStatus) -> Iterator[Finding]:
    for worker in status.workers:
        account = account_of(status, worker.worker)
        for name, census in {account.component: account.census, **account.components}.items():
            if not census:
                continue
            lost = unaccounted(census)
            if lost:
                value = f"{lost} pages of {name} belong to nobody"
                yield Finding(worker.worker, Severity.FAIL, value, "a bug of ours: please report `baton kv --json`")
            elif census["quarantined"]:
                value = f"{census['quarantined']} pages of {name} wait for proof that nobody writes to them"
                yield Finding(worker.worker, Severity.WARN, value, "normal for a moment after a worker was lost")


def _lanes_in_use(status: GatewayStatus) -> Iterator[Finding]:
    """A slow lane where a faster one is up is what nobody sees otherwise."""
    for use in status.lanes:
        lanes = [lane for lane in account_of(status, use.decode_worker).lanes if lane.peer == use.prefill_worker]
        speed = next((lane.gbps for lane in lanes if lane.lane == use.lane), 0.0)
        pair = f"{use.prefill_worker} to {use.decode_worker}"
        faster = [lane for lane in lanes if lane.status == "up" and speed and lane.gbps > CLEARLY_FASTER * speed]
        down = [lane for lane in lanes if lane.status != "up"]
        if faster:
            value = f"over {use.lane} at {speed:.2f} GB/s, though {faster[0].lane} reaches {faster[0].gbps:.2f}"
            yield Finding(pair, Severity.WARN, value, "normal for a moment after a lane came up")
        elif down:
            told = ", ".join(f"{lane.lane} {lane.status}{f' ({lane.reason})' if lane.reason else ''}" for lane in down)
            yield Finding(pair, Severity.OK, f"over {use.lane}, {speed:.2f} GB/s; {told}")
        else:
            yield Finding(pair, Severity.OK, f"over {use.lane}, {speed:.2f} GB/s")
