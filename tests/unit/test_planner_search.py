"""What is recommended, and what the command makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from planner_rig import COST, costing, steady

from baton.common.errors import ConfigError
from baton.deploy import charts
from baton.deploy.cli import MISUSED, OK, run_command
from baton.deploy.planner.cluster import Knobs, Split
from baton.deploy.planner.cost import CostModel, PrefillCost, encode_cost
from baton.deploy.planner.outcome import Slo, parse_slo
from baton.deploy.planner.search import Plan, Search, plan_for_rate, plan_for_workers
from baton.deploy.planner.traces import Trace

TRACE = steady(rate=5.0, requests=150, prompt=800, output=40)
STRICT = parse_slo("ttft=500ms,itl=25ms")
"""Below what a step takes beside a chunk, above what it takes without."""


def searching(slo: Slo, cost: CostModel = COST, trace: Trace = TRACE) -> Search:
    return Search(cost, trace, slo, 0.9, Knobs(), lambda _: None)


def plan(slo: Slo, workers: int) -> Plan:
    return plan_for_workers(searching(slo), TRACE, slo, 0.9, workers)


def test_streams_that_must_not_stall_are_kept_apart_from_prompts() -> None:
    found = plan(STRICT, 4)
    assert found.disaggregate
    assert found.chosen.split.prefill > 0
    assert found.chosen.split.workers == 4
    assert found.chosen.goodput is not None
    assert found.chosen.goodput > 1.5 * (found.colocated.goodput or 0.0)


def test_where_nothing_is_promised_of_gaps_a_split_buys_nothing() -> None:
    found = plan(parse_slo("ttft=500ms"), 2)
    assert not found.disaggregate
    assert found.chosen.split == Split(0, 2)


def test_goodput_is_where_the_promises_end_to_be_kept() -> None:
    search = searching(STRICT)
    option = search.option(Split(2, 2))
    assert option.goodput is not None
    assert search.keeps(Split(2, 2), option.goodput)
    assert not search.keeps(Split(2, 2), option.goodput * 1.05)
    assert option.at_goodput.attainment >= 0.9


def test_the_fewest_workers_for_a_rate_keep_it_and_fewer_do_not() -> None:
    found = plan_for_rate(searching(STRICT), TRACE, STRICT, 0.9, 20.0)
    workers = found.chosen.split.workers
    assert found.disaggregate
    search = searching(STRICT)
    assert search.keeps(found.chosen.split, 20.0)
    assert not any(search.keeps(split, 20.0) for split in search.near(workers - 1, 0.5))


def test_what_no_cluster_keeps_is_said_with_the_reason() -> None:
    slo = parse_slo("ttft=10ms")
    with pytest.raises(ConfigError) as refused:
        plan_for_rate(searching(slo), TRACE, slo, 0.9, 5.0)
    assert "of requests that come one at a time 100% miss ttft, 0% their gaps" in str(refused.value)
    with pytest.raises(ConfigError, match="at least two"):
        plan_for_workers(searching(STRICT), TRACE, STRICT, 0.9, 1)


def test_dearer_prompts_want_more_prefill_workers() -> None:
    slow = costing(prefill=PrefillCost(base_s=0.01, per_token_s=0.0005, per_pair_s=0.0))
    slo = parse_slo("ttft=3s,itl=25ms")
    cheap, dear = (
        plan_for_workers(searching(slo, cost), TRACE, slo, 0.9, 6).best.split.prefill for cost in (COST, slow)
    )
    assert dear > cheap


@pytest.mark.parametrize("text", ["ttft=2", "ttft", "itl=50 parsecs", "frob=1s", "ttft=-1s", "ttft=nans", "", "ttft=s"])
def test_a_promise_that_is_none(text: str) -> None:
    with pytest.raises(ConfigError, match="for example --slo ttft=2s,itl=50ms"):
        parse_slo(text)


def test_promises() -> None:
    assert parse_slo("ttft=2s, itl=50ms,tpot=800us") == Slo(2.0, 0.05, pytest.approx(0.0008))
    assert str(parse_slo("itl=50ms,ttft=2s")) == "ttft 2 s, itl 50 ms"


# ------------------------------------------------------------------------------------------------- the command


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """(a trace, a cost file)."""
    trace, cost = tmp_path / "trace.jsonl", tmp_path / "cost.json"
    lines = [
        json.dumps({"arrival_s": one.arrival_s, "prompt_tokens": one.prompt_tokens, "output_tokens": one.output_tokens})
        for one in TRACE.requests
    ]
    trace.write_text("\n".join(lines))
    cost.write_bytes(encode_cost(COST))
    return trace, cost


def asked(files: tuple[Path, Path], *more: str) -> list[str]:
    trace, cost = files
    return ["plan", "--trace", str(trace), "--cost", str(cost), "--slo", "ttft=500ms,itl=25ms", *more]


def test_the_command_answers_in_words_and_draws(
    files: tuple[Path, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "plan.html"
    assert run_command(asked(files, "--workers", "3", "--out", str(page))) == OK
    said = capfd.readouterr().out
    assert said.splitlines()[0] in (
        "1P+2D: 1 prefill and 2 decode workers",
        "2P+1D: 2 prefill and 1 decode workers",
    )
    assert "3 colocated: up to" in said
    text = page.read_text()
    _, drawing = text.split("<svg")
    root = ElementTree.fromstring("<svg" + drawing.split("</svg>")[0] + "</svg>")
    assert len(root.findall("{http://www.w3.org/2000/svg}circle")) == 9 * 3, "a point per rate and split"
    assert "http" not in text.replace("http://www.w3.org/2000/svg", ""), "it loads nothing"


def test_the_command_answers_programs(files: tuple[Path, Path], capfd: pytest.CaptureFixture[str]) -> None:
    assert run_command(asked(files, "--json", "--rate", "8")) == OK
    found = json.loads(capfd.readouterr().out)
    assert found["disaggregate"] is True
    assert found["prefill"] >= 1
    assert found["best"]["curve"][0]["attainment"] == 1.0


def test_settings_of_workers_count(files: tuple[Path, Path], capfd: pytest.CaptureFixture[str]) -> None:
    def goodput(*settings: str) -> float:
        assert run_command(asked(files, "--json", "--workers", "2", *settings)) == OK
        found: float = json.loads(capfd.readouterr().out)["best"]["goodput"]
        return found

    assert goodput("--set", "prefill_worker.chunk_tokens=32") < goodput()


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--workers", "1"], "--workers = 1: prefill and decode apart need at least two"),
        (["--target", "2"], "--target = 2.0: is a share"),
        (["--rate", "-1"], "--rate = -1.0: must be positive"),
        (["--out", "plan.pdf"], "--out = 'plan.pdf': is drawn as .html, .svg or .png"),
        (["--cost", "/nowhere.json"], "make one: baton calibrate"),
        (["--trace", "/nowhere.jsonl"], "--trace = '/nowhere.jsonl': cannot be read"),
        (["--slo", "soon"], "--slo = 'soon': is none of ttft"),
        (["--set", "kv.pagesize=3"], "did you mean kv.page_size?"),
        (["--slo", "ttft=1s,ttft=2s"], "--slo = 'ttft=1s,ttft=2s': promises ttft twice"),
        (["--workers", "2", "--rate", "3"], "--rate = 3.0: of so many workers the best rate is looked for"),
        (["--workers", "2", "--out", "/nowhere/plan.svg"], "there is no folder /nowhere"),
    ],
)
def test_misuse_is_told_in_words(
    files: tuple[Path, Path], capfd: pytest.CaptureFixture[str], more: list[str], says: str
) -> None:
    assert run_command(asked(files, *more)) == MISUSED
    assert says in " ".join(capfd.readouterr().err.split())


def test_a_trace_that_is_over_too_soon_is_refused(files: tuple[Path, Path], capfd: pytest.CaptureFixture[str]) -> None:
    files[0].write_text("\n".join(files[0].read_text().splitlines()[:2]))
    assert run_command(asked(files, "--workers", "2")) == MISUSED
    assert "is over too soon" in " ".join(capfd.readouterr().err.split())


def test_what_nobody_keeps_is_no_advice_to_colocate(
    files: tuple[Path, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_command([*asked(files, "--workers", "2"), "--slo", "ttft=1ms"]) == OK
    said = capfd.readouterr().out
    assert said.splitlines()[0] == "Neither: 2 workers, split or not, do not even keep it for one request at a time"
    assert "worth it" not in said


def test_a_png_needs_matplotlib(
    files: tuple[Path, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(charts, "find_spec", lambda name: None)
    assert run_command(asked(files, "--workers", "2", "--out", str(tmp_path / "plan.png"))) == MISUSED
    assert "pip install 'baton-pd[plot]', or --out plan.html" in " ".join(capfd.readouterr().err.split())


def test_a_png_is_drawn_where_matplotlib_is(files: tuple[Path, Path], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install matplotlib")
    drawn = tmp_path / "plan.png"
    assert run_command(asked(files, "--workers", "2", "--out", str(drawn))) == OK
    assert drawn.read_bytes().startswith(b"\x89PNG")
