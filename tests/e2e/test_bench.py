"""`baton bench` against a served gateway: the load that was asked for arrives, and what is told is what happened."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from http_loopback import Loopback, serving

from baton.common.messages import unpack_tokens
from baton.deploy.cli import FAILED, MISUSED, OK, run_command

PACE_S = 0.02


def test_every_request_is_asked_as_it_was_to_be_and_measured(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out, picture = tmp_path / "found.json", tmp_path / "found.html"
    with serving(Loopback(pace_s=PACE_S)) as served:
        code = run_command(
            f"bench --url {served.url} --lengths 40:6 --rates 20,40 --requests 12 --slo ttft=10s,itl=5s"
            f" --out {out} --picture {picture}".split()
        )
        submits = served.worker.submits
    said = capfd.readouterr()
    assert code == OK, said.err
    found = msgspec.json.decode(out.read_bytes())
    assert [(one["rate"], one["requests"], one["failures"], one["kept"]) for one in found["points"]] == [
        (20.0, 12, {}, 12), (40.0, 12, {}, 12),
    ]  # fmt: skip
    for point in found["points"]:
        assert (point["prompt_tokens"], point["output_tokens"]) == (12 * 40, 12 * 6)
        assert 5 * PACE_S <= point["e2e"]["p50"] < 10.0
        assert 0 < point["ttft"]["p50"] < point["e2e"]["p50"]
    prompts = [tuple(unpack_tokens(one.prompt)) for one in submits]
    assert {len(prompt) for prompt in prompts} == {40}
    assert len(set(prompts)) == len(prompts) == 4 + 24  # four to warm up, and nothing that a cache knows
    assert not any(one.sampling.stop_token_ids for one in submits)
    assert "100%" in said.out
    assert "40:6: ttft=10s,itl=5s" in picture.read_text()


def test_refusals_and_broken_answers_are_counted_and_named(capfd: pytest.CaptureFixture[str]) -> None:
    with serving(Loopback()) as served:
        assert run_command(f"bench --url {served.url} --lengths 300:6 --rates 50 --requests 3".split()) == OK
        assert "3 failed: 3 x HTTP 400 prompt_too_long" in capfd.readouterr().out
    with serving(Loopback(failure_after=2)) as served:
        arguments = f"bench --url {served.url} --lengths 30:6 --at-once 2 --requests 3 --json"
        assert run_command(arguments.split()) == OK
        (point,) = msgspec.json.decode(capfd.readouterr().out)["points"]
        assert point["failures"] == {"transfer_corrupt": 3}


def test_as_many_at_once_as_were_allowed(capfd: pytest.CaptureFixture[str]) -> None:
    class Counting(Loopback):
        most = 0

        def post(self, effect: object) -> None:
            super().post(effect)  # type: ignore[arg-type]
            self.most = max(self.most, served.gateway.load().running)

    with serving(Counting(pace_s=PACE_S)) as served:
        assert run_command(f"bench --url {served.url} --lengths 30:6 --at-once 3 --requests 12".split()) == OK
        assert isinstance(served.worker, Counting)
        assert served.worker.most == 3


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ("--url http://127.0.0.1:9", FAILED, "no OpenAI-compatible server answers at http://127.0.0.1:9"),
        ("--rates 0", MISUSED, "--rates"),
        ("--trace /nowhere.jsonl", MISUSED, "--trace"),
        ("--picture x.html", MISUSED, "--slo"),
        ("--picture x.pdf --slo ttft=1s", MISUSED, ".html, .svg or .png"),
        ("--picture x.html --slo ttft=1s --at-once 2", MISUSED, "--rates"),
        ("--out /nowhere/x.json", MISUSED, "no such directory"),
        ("--prefill 2", MISUSED, "need --compare colocated"),
        ("--compare colocated --url http://127.0.0.1:9", MISUSED, "without --url"),
        ("--compare colocated --model fake --prefill 0", MISUSED, "no split to compare with"),
    ],
)
def test_misuse_is_told_before_anything_starts(
    arguments: str, code: int, says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["bench", *arguments.split()]) == code
    assert says in " ".join(capfd.readouterr().err.split())
