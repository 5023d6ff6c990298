"""What a person sees: tables within eighty columns, words kept whole, lost pages in plain sight."""

from __future__ import annotations

import io

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from baton.common.messages import Load, Timeline
from baton.deploy.client import Answer
from baton.deploy.show import (
    Wrapped,
    all_accounted,
    all_idle,
    print_census,
    print_lanes,
    print_status,
    print_timings,
    timing_line,
)
from baton.deploy.status import GatewayStatus, LaneUse, WorkerView

IDLE = {
    "free": 1000, "cached": 92, "cached_locked": 0, "request": 0, "session": 0, "incoming": 0, "outgoing": 0,
    "quarantined": 0, "total": 1092,
}  # fmt: skip


def status_with(**decode_pages: int) -> GatewayStatus:
    censuses = {"prefill-0": IDLE, "decode-0": {**IDLE, **decode_pages}}
    lanes = [
        {"peer": "prefill-0", "lane": "ucx", "status": "down", "reason": "no ucxx"},
        {"peer": "prefill-0", "lane": "tcp", "status": "up", "gbps": 0.28},
        {"peer": "prefill-0", "lane": "zmq", "status": "up"},
    ]
    return GatewayStatus(
        version="1",
        model="some-model",
        max_model_len=8192,
        ready=True,
        reason="",
        requests=Load(running=3),
        workers=[
            WorkerView(worker=name, role=name.split("-")[0], incarnation=2, silent=False, load=Load(total_pages=1092))
            for name in ("decode-0", "prefill-0", "gateway-0")
        ],
        lanes=[
            LaneUse(
                prefill_worker="prefill-0",
                decode_worker="decode-0",
                lane="local",
                transfers=12,
                nbytes=1 << 30,
                seconds=1.0,
            )
        ],
        details={
            name: {"census": census, "lanes": lanes, "pid": 1, "cores": [core]}
            for core, (name, census) in enumerate(censuses.items(), 6)
        },
    )


def answer() -> Answer:
    timeline = Timeline(
        queue_s=0.0123,
        handoff_s=1.6,
        prefill_s=1.5,
        transfer_s=0.1,
        decode_s=2.0,
        transfer_bytes=123 << 20,
        lane="local",
        prefill_worker="prefill-10",
        decode_worker="decode-12",
        local_tokens=2,
        cached_tokens=16,
        transferred_tokens=3000,
        prefill_cached_tokens=1024,
    )
    return Answer("text", "stop", 3018, 100, 1040, "id", 1.7, 4.0, 1, timeline)


def shown_by(show: object, *values: object) -> str:
    out = io.StringIO()
    console = Console(file=out, width=80, highlight=False)
    show(*values, console)  # type: ignore[operator]
    lines = out.getvalue().splitlines()
    assert max(len(line) for line in lines) <= 80
    assert "…" not in out.getvalue(), "nothing is cut off"
    return out.getvalue()


def test_status_fits_a_terminal() -> None:
    shown = shown_by(print_status, status_with())
    assert [line.split()[-1] for line in shown.splitlines() if line.startswith("prefill-0@2")] == ["6"], "its core"
    for word in ("some-model", "decode-0@2", "prefill-0", "local", "1.0 GiB", "free or cached"):
        assert word in shown
    assert "ucx down (no ucxx), tcp 0.28, zmq up" in shown


def test_what_does_not_fit_a_terminal_is_not_cut() -> None:
    status = status_with()
    use = msgspec.structs.replace(status.lanes[0], decode_worker="decode-0", lane="x" * 70)
    out = io.StringIO()
    print_lanes(msgspec.structs.replace(status, lanes=[use]), Console(file=out, width=80))
    assert "…" not in out.getvalue()
    for word in ("prefill-0", "decode-0", "x" * 70, "12", "1.0 GiB", "tcp 0.28"):
        assert word in out.getvalue()


def test_an_upgrade_that_was_given_up_is_named() -> None:
    told = "revision 2 was given up: decode-2 did not come up; revision 1 serves"
    assert told in shown_by(print_status, msgspec.structs.replace(status_with(), given_up=told))


def test_timings_fit_a_terminal() -> None:
    shown = shown_by(print_timings, [("follow-up", answer()), ("summary", answer())])
    for word in ("12.3", "1500.0", "123.0 MiB", "prefill-10", "decode-12", "3000", "50"):
        assert word in shown
    line = timing_line(answer())
    assert "hand-off with its prefill 1.60 s: 123.0 MiB over local · prefill 1.50 s" in line
    assert line.endswith("request id")


def test_where_the_prompt_came_from_adds_up() -> None:
    lines = shown_by(print_timings, [("summary", answer())]).splitlines()
    head = next(index for index, line in enumerate(lines) if line.split()[:2] == ["request", "prompt"])
    shown = dict(zip(lines[head].split(), lines[head + 1].split(), strict=False))
    prompt, here, cached, moved, found = (
        int(shown[column]) for column in ("prompt", "here", "cached", "moved", "found")
    )
    assert (here, cached, moved) == (2, 16, 3000)
    assert prompt == here + cached + moved
    assert found == 1024


def test_pages_in_use_and_pages_lost_are_told_apart() -> None:
    in_use = status_with(free=999, request=1)
    assert (all_idle(in_use), all_accounted(in_use)) == (False, True)
    assert "in use" in shown_by(print_status, in_use)
    lost = status_with(free=999)
    assert (all_idle(lost), all_accounted(lost)) == (False, False)
    assert "1 LOST" in shown_by(print_status, lost)


def test_a_worker_without_pages_takes_no_line() -> None:
    lines = [line.split() for line in shown_by(print_census, status_with()).splitlines()]
    head = next(index for index, line in enumerate(lines) if line[:2] == ["worker", "free"])
    assert [line[:1] for line in lines[head + 1 : head + 4]] == [["decode-0"], ["prefill-0"], ["Every"]]


def test_levels_below_the_pools_have_a_line() -> None:
    assert "Tiers" not in shown_by(print_status, status_with())
    status = status_with()
    names = ("used_bytes", "capacity_bytes", "hits", "misses", "written", "damaged", "failed_writes")
    disk = dict(zip(names, (5 << 30, 64 << 30, 123456, 7, 654321, 3, 0), strict=True))
    status.details["decode-0"]["counters"] = {  # type: ignore[index]
        **{f"tiers.disk.{name}": value for name, value in disk.items()},
        **{f"tiers.host.{name}": 0 for name in names},
        "tiers.restores": 9,
    }
    lines = [line.split() for line in shown_by(print_status, status).splitlines()]
    assert ["decode-0", "disk", "5.0", "GiB", "64.0", "GiB", "123456", "7", "654321", "3", "0"] in lines
    assert ["decode-0", "host", "0", "B", "0", "B", "0", "0", "0", "0", "0"] in lines


def test_every_component_has_a_line_and_a_verdict() -> None:
    status = status_with()
    slots = {**dict.fromkeys(IDLE, 0), "free": 5, "incoming": 1, "total": 6}
    status.details["decode-0"]["components"] = {"swa": IDLE, "state": slots}  # type: ignore[index]
    shown = shown_by(print_status, status)
    lines = {line.split()[0]: line for line in shown.splitlines() if line.split()}
    assert lines["decode-0"].split() == ["decode-0"], "its components are below"
    assert "1000" in lines["full"]
    assert "idle" in lines["swa"]
    assert "in use" in lines["state"]
    assert (all_idle(status), all_accounted(status)) == (False, True)
    slots["free"] = 4
    assert not all_accounted(status)


def test_a_model_of_one_component_says_which_unless_it_is_full_attention() -> None:
    status = status_with()
    status.details["decode-0"]["component"] = "swa"  # type: ignore[index]
    lines = [line.split() for line in shown_by(print_status, status).splitlines()]
    assert ["decode-0"] in lines
    assert [line[0] for line in lines if line[1:3] == ["1000", "92"]] == ["swa", "prefill-0"]


@given(st.lists(st.text("ab \n", max_size=12), max_size=20))
def test_wrapping_changes_nothing_but_spaces_into_line_ends(parts: list[str]) -> None:
    out: list[str] = []
    wrapped = Wrapped(out.append, 10)
    for part in parts:
        wrapped.write(part)
    wrapped.finish()
    shown, text = "".join(out), "".join(parts)
    assert [char for char in shown if not char.isspace()] == [char for char in text if not char.isspace()]
    if not any(len(word) > 10 for word in text.split()):
        assert shown.split() == text.split()
        assert all(len(line) <= 10 for line in shown.split("\n"))
