"""`baton jobs` and `baton submit` against a served gateway: what is printed, exit codes, and files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from http_loopback import Loopback, Served, saying, serving

from baton.deploy.cli import FAILED, MISUSED, OK, run_command
from baton.deploy.client import Job
from baton.deploy.jobs.shapes import BatchObject
from baton.deploy.jobs.terminal import Rate

Baton = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(Loopback(script=saying("Hello"))) as served:
        yield served


@pytest.fixture
def baton(served: Served, capfd: pytest.CaptureFixture[str]) -> Baton:
    """(exit code, stdout, stderr) of a `baton jobs` command, or, with `group=()`, of another."""

    def run(*arguments: str, url: str = served.url, group: tuple[str, ...] = ("jobs",)) -> tuple[int, str, str]:
        code = run_command([*group, *arguments, "--url", url])
        said = capfd.readouterr()
        assert "Traceback" not in said.err + said.out
        return code, said.out, said.err

    return run


def line(custom_id: str, model: str = "fake") -> dict[str, Any]:
    body = {"model": model, "prompt": "hi", "max_tokens": 5}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(json.dumps(line(str(n))) for n in range(30)))
    return path


def test_from_submitting_to_results(baton: Baton, lines: Path, tmp_path: Path) -> None:
    code, batch, _ = baton("submit", str(lines))
    batch = batch.strip()
    assert (code, batch[:6]) == (OK, "batch_")
    code, told, watched = baton("status", batch, "--watch")
    assert (code, told) == (OK, f"{batch} completed: 30 of 30 lines answered, 0 failed, 150 tokens\n")
    assert "30/30" in watched
    assert "tokens/s" in watched
    assert "ETA" in watched
    assert baton("status", batch)[1] == told
    assert json.loads(baton("status", batch, "--json")[1])["request_counts"]["completed"] == 30
    code, listed, _ = baton("status")
    assert (code, batch in listed) == (OK, True)
    code, results, _ = baton("results", batch)
    assert [json.loads(one)["custom_id"] for one in results.splitlines()] == [str(n) for n in range(30)]
    out = tmp_path / "out.jsonl"
    assert baton("results", batch, "--out", str(out))[0] == OK
    assert out.read_text() == results
    assert [path.name for path in tmp_path.iterdir() if "part" in path.name] == []
    assert baton("results", batch, "--errors")[:2] == (OK, "")
    _, log, _ = baton("logs", batch)
    assert "begun: 30 lines to /v1/completions" in log
    assert "completed: 30 answered, 0 failed" in log
    assert [one.split()[2] for one in log.splitlines()] == ["submitted", "begun:", "completed:"]


def test_watching_tells_by_its_exit_code_whether_all_went_well(baton: Baton, tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text(f"{json.dumps(line('good'))}\n{json.dumps(line('bad', 'other'))}")
    code, told, said = baton("submit", str(path), "--watch", "--json")
    found = json.loads(told)
    assert (code, found["status"], found["request_counts"]["failed"]) == (FAILED, "completed", 1)
    assert found["id"] in said
    _, log, _ = baton("logs", found["id"])
    assert "bad: HTTP 404:" in log
    assert len(json.loads(baton("logs", found["id"], "--json")[1])["failures"]) == 1
    assert '"bad"' in baton("results", found["id"], "--errors")[1]
    path.write_text("nonsense")
    code, told, said = baton("submit", str(path), "--watch")
    assert (code, "failed: 0 of 0" in told) == (FAILED, True)
    assert f"baton jobs logs {told.split()[0]}" in said
    assert "line 1: invalid_json_line" in baton("logs", told.split()[0])[1]


def test_cancelling_and_what_is_too_early(lines: Path, baton: Baton) -> None:
    with serving(Loopback(silent=True)) as stuck:
        batch = baton("submit", str(lines), url=stuck.url)[1].strip()
        code, _, said = baton("results", batch, url=stuck.url)
        assert (code, "its files come at its end" in said) == (FAILED, True)
        code, told, _ = baton("cancel", batch, url=stuck.url)
        assert (code, told.split()[1]) == (OK, "cancelled:")
        assert "batch_cancelled" in baton("logs", batch, url=stuck.url)[1] or told.endswith("0 tokens\n")
        assert baton("status", batch, "--watch", url=stuck.url)[0] == FAILED


def test_who_interrupts_the_waiting_does_not_interrupt_the_job(
    lines: Path, baton: Baton, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(job: Job) -> Iterator[BatchObject]:
        yield job.status()
        raise KeyboardInterrupt

    monkeypatch.setattr(Job, "progress", interrupted)
    code, told, said = baton("submit", str(lines), "--wait")
    assert (code, told, "it goes on; `baton jobs status batch_" in said) == (130, "", True)
    monkeypatch.undo()
    assert baton("status", said.split()[0], "--wait")[0] == OK


def test_the_same_key_gives_the_same_batch(baton: Baton, lines: Path) -> None:
    first, again = (baton("submit", str(lines), "--key", "k")[1] for _ in range(2))
    assert first == again


def test_keys_part_people(baton: Baton, lines: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_API_KEY", "a")
    batch = baton("submit", str(lines))[1].strip()
    assert baton("status", batch)[0] == OK
    monkeypatch.setenv("BATON_API_KEY", "b")
    code, _, said = baton("status", batch)
    assert (code, "there is no batch" in said) == (FAILED, True)


def test_misuse(baton: Baton, lines: Path) -> None:
    assert baton("submit", "/nowhere.jsonl")[0] == MISUSED
    assert baton("status", "--watch")[0] == MISUSED
    assert baton("status", "batch_x")[0] == FAILED
    code, _, said = baton("submit", str(lines), "--window", "soon")
    assert (code, "completion_window" in said) == (FAILED, True)


def test_submitting_prompts(baton: Baton, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, answer, said = baton("submit", "What is a page?", "--wait", "--max-tokens", "3", group=())
    assert (code, answer) == (OK, "Hel\n")
    assert said.startswith("batch_")
    path = tmp_path / "prompts.txt"
    path.write_text("one\n\ntwo\nthree\n")
    code, told, _ = baton("submit", str(path), "--raw", "--wait", group=())
    assert (code, "3 of 3 lines answered" in told) == (OK, True)
    results = baton("results", told.split()[0])[1].splitlines()
    assert {json.loads(one)["response"]["body"]["object"] for one in results} == {"text_completion"}
    for content, count in (("one\ntwo", 2), (json.dumps(line("a")), 1)):
        with path.open("w") as file:
            file.write(content)
        with path.open() as file:
            monkeypatch.setattr("sys.stdin", file)
            code, told, _ = baton("submit", "-", "--wait", "--json", group=())
        assert (code, json.loads(told)["request_counts"]["completed"]) == (OK, count)


def test_submitting_what_is_none(baton: Baton, tmp_path: Path, lines: Path) -> None:
    assert baton("submit", "prompts.txt", group=())[0] == MISUSED
    assert baton("submit", str(lines), "--max-tokens", "3", group=())[0] == MISUSED
    assert baton("submit", "a prompt", "--endpoint", "/v1/completions", group=())[0] == MISUSED
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    assert baton("submit", str(tmp_path / "binary"), group=())[0] == MISUSED
    (tmp_path / "empty").write_bytes(b"\n")
    code, _, said = baton("submit", str(tmp_path / "empty"), group=())
    assert (code, "there is no prompt" in said) == (FAILED, True)
    code, told, said = baton("submit", "too long" * 100, "--wait", group=())
    assert (code, "1 failed" in told) == (FAILED, True)


def test_a_rate_is_that_of_late() -> None:
    rate = Rate()
    assert rate.after(100, 0.0) == 0.0
    assert rate.after(200, 10.0) == 10.0
    assert [rate.after(200 + n * 100, 10.0 + n) for n in range(1, 21)][-1] == 100.0
