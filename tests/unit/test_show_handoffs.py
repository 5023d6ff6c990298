"""How fast hand-offs are and what they waited for, within eighty columns; the lives of the last ones."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import pytest
from test_show import shown_by, status_with
from test_worker_metrics import latencies

from baton.deploy import show
from baton.deploy.cli import run_command
from baton.deploy.show import print_status
from baton.deploy.show_handoffs import print_handoff, print_handoffs
from baton.deploy.status import GatewayStatus
from baton.transfer.reports import Flow, HandoffTimes, RegionTimes

IN = Flow(
    peer="prefill-0", lane="local", direction="in", recent_gbps=12.34, handoff=latencies(*[0.04] * 99, 2.0),
    queued=100, queue_s=0.5, resent_frames=2, damaged_regions=3, failed=7, nbytes=1 << 30, busy_s=0.1,
)  # fmt: skip
OUT = Flow(
    peer="decode-0", lane="local", direction="out", tail=latencies(*[0.0004] * 99, 0.009), resent_frames=4,
    damaged_regions=3, stalls=5, stall_s=1.5,
)  # fmt: skip
GOOD = HandoffTimes(
    handoff="00000000000000aa/1", direction="in", request_id="req-1", peer="prefill-0", lane="local", tokens=4096,
    begun_at_s=1.0, outcome="committed",
    marks={"offered": 0.0002, "accepted": 0.001, "first region": 0.5, "all announced": 0.9, "committed": 0.91,
           "over": 0.91},
    regions=(RegionTimes(0, 0.5, 0.503, 1 << 20), RegionTimes(1, 0.89, 0.893, 1 << 20)), region_count=2,
    nbytes=2 << 20, stalls=1, stall_s=0.05,
)  # fmt: skip
BAD = HandoffTimes(
    handoff="00000000000000ab/2", direction="in", request_id="req-2", peer="prefill-1", lane="", tokens=16,
    begun_at_s=2.0, outcome="failed", reason="no_worker: gone", marks={"failed": 0.1, "over": 0.1},
)  # fmt: skip


def with_flows() -> GatewayStatus:
    status = status_with()
    for worker, flow in (("decode-0", IN), ("prefill-0", OUT)):
        status.details[worker]["flows"] = [msgspec.to_builtins(flow)]  # type: ignore[index]
    return status


def test_a_pair_of_workers_has_one_line_made_of_what_both_tell() -> None:
    assert "tail50" not in shown_by(print_status, status_with())
    lines = [line.split() for line in shown_by(print_status, with_flows()).splitlines()]
    [at] = [index for index, line in enumerate(lines) if "tail50" in line]
    told = dict(zip(lines[at], lines[at + 1], strict=True))
    assert [told["from"], told["to"], told["lane"]] == ["prefill-0", "decode-0", "local"]
    assert (told["GB/s"], told["wait"], told["again"], told["failed"]) == ("12.34", "5.0", "9", "7")
    assert 25.0 < float(told["p50"]) <= 50.0
    assert 25.0 < float(told["p99"]) <= 2500.0
    assert 0.1 < float(told["tail50"]) <= 0.5
    assert told["stall"] == "1500"


def test_last_hand_offs_are_rows_with_a_column_for_each_thing_that_happened() -> None:
    lines = [line.split() for line in shown_by(print_handoffs, "decode-0", [GOOD, BAD]).splitlines()]
    head, good, bad, failed = lines[1:5]
    assert head == ["request", "peer", "lane", "tokens", "bytes", "offer", "accept", "region", "sent", "commit", "over"]
    assert good == ["req-1", "prefill-0", "local", "4096", "2.0", "MiB", "0.2", "1.0", "500", "900", "910", "910"]
    assert bad[:3] == ["req-2", "prefill-1", "-"]
    assert failed == ["req-2", "failed:", "no_worker:", "gone"]


def test_one_hand_off_in_full_is_in_the_order_in_which_it_happened() -> None:
    shown = shown_by(print_handoff, GOOD)
    table = shown[shown.index("what") :]
    order = [table.index(word) for word in ("offered", "accepted", "first region", "region 0", "region 1", "committed")]
    assert order == sorted(order)
    assert "1 waits for credit, 50.0 ms" in shown


@dataclass
class FakeFetch:
    found: list[HandoffTimes]

    def __call__(self, url: str, worker: str) -> list[HandoffTimes]:
        return self.found


def test_the_command_prints_those_of_one_request(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(show, "fetch_handoffs", FakeFetch([GOOD, BAD]))
    assert run_command(["handoffs", "decode-0", "--request", "req-2", "--json"]) == 0
    assert [one["request_id"] for one in msgspec.json.decode(capsys.readouterr().out)] == ["req-2"]
    assert run_command(["handoffs", "decode-0", "--request", "req-", "--json"]) == 0, "as the table shortens it"
    assert len(msgspec.json.decode(capsys.readouterr().out)) == 2
    assert run_command(["handoffs", "decode-0", "--request", "eq-2"]) == 1
    assert "decode-0 keeps 2 hand-offs, none of a request 'eq-2'" in capsys.readouterr().err
    assert run_command(["handoffs", "decode-0", "--last", "1", "--json"]) == 0
    assert [one["request_id"] for one in msgspec.json.decode(capsys.readouterr().out)] == ["req-2"]
