"""What a gateway tells of its workers over HTTP: their counters, hand-offs and recordings. The workers are played."""

from __future__ import annotations

from collections.abc import Mapping

import httpx
import pytest
from http_loopback import Served, serving
from trace_checks import check_chrome_trace

from baton.common.errors import ErrorCode, RequestError
from baton.common.kv.layout import Component
from baton.common.trace import ProcessTrace, Slice, ThreadTrace
from baton.deploy.client import Client
from baton.transfer.reports import Flow, HandoffTimes, WorkerMetrics

TIMES = HandoffTimes(
    handoff="00000000000000aa/1", direction="in", request_id="r", peer="prefill-0", lane="zmq", tokens=16,
    begun_at_s=1.5, outcome="open", marks={"offered": 0.25},
)  # fmt: skip


class PlayedWorkers:
    """`asked`: how often for metrics; `seconds`: of each recording."""

    def __init__(self) -> None:
        self.asked = 0
        self.seconds: list[float] = []

    async def statuses(self) -> Mapping[str, object]:
        return {}

    async def page_owner(self, worker: str, page: int, component: Component | None) -> str:
        return ""

    async def metrics(self) -> Mapping[str, WorkerMetrics]:
        self.asked += 1
        return {"decode-0": WorkerMetrics(flows=(Flow(peer="prefill-0", lane="zmq", direction="in", nbytes=77),))}

    async def handoffs(self, worker: str) -> list[HandoffTimes]:
        if worker != "decode-0":
            raise RequestError(ErrorCode.INVALID_REQUEST, f"there is no worker {worker!r} with pages", "worker")
        return [TIMES]

    async def record(self, seconds: float) -> list[ProcessTrace]:
        self.seconds.append(seconds)
        engine = ThreadTrace(items=(Slice("decode", 1.0, 1.5, {"rows": 3}),))
        threads = {"engine": engine, "io": ThreadTrace(items=())}
        return [ProcessTrace(process="decode-0", pid=5, wall_offset_s=100.0, threads=threads)]


def played(served: Served) -> PlayedWorkers:
    workers = PlayedWorkers()
    served.gateway.workers = workers
    return workers


def test_metrics_hold_what_workers_count_and_ask_them_once_for_many_scrapes() -> None:
    with serving() as served:
        workers = played(served)
        for _ in range(3):
            page = served.http.get("/metrics").text
        line = 'baton_transfer_bytes_total{direction="in",lane="zmq",peer="prefill-0",worker="decode-0"} 77.0'
        assert line in page.splitlines()
        assert workers.asked == 1


def test_hand_offs_and_traces_come_through_the_client() -> None:
    with serving() as served, Client(served.url) as client:
        workers = played(served)
        assert client.handoffs("decode-0") == [TIMES]
        with pytest.raises(RequestError, match="no worker 'nobody'"):
            client.handoffs("nobody")
        trace = httpx.Response(200, content=client.trace(0.25)).json()
        check_chrome_trace(trace)
        assert workers.seconds == [0.25]
        [step] = [event for event in trace["traceEvents"] if event["ph"] == "X"]
        assert (step["name"], step["dur"], step["args"]) == ("decode", 5e5, {"rows": 3})


@pytest.mark.parametrize("seconds", ["0", "-1", "3600", "nan", "soon"])
def test_a_trace_takes_a_bounded_time(seconds: str) -> None:
    with serving() as served:
        workers = played(served)
        assert served.http.post(f"/trace?seconds={seconds}").status_code == 400
        assert workers.seconds == []


def test_a_gateway_that_cannot_ask_says_so() -> None:
    with serving() as served:
        assert served.http.get("/handoffs/decode-0").status_code == 400
        assert "baton_transfer_bytes_total{" not in served.http.get("/metrics").text
        check_chrome_trace(served.http.post("/trace").json())
