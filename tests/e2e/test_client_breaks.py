"""`baton.client` when things break: connections, through a proxy that cuts them; gateways; and its own process."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from cutting_proxy import cutting
from http_loopback import GIVE_UP_S, Loopback, Served, saying, serving, wait
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.client import Answer, AsyncClient, Client, ClusterUnreachable
from baton.common.messages import Submit, unpack_tokens
from baton.deploy.client import connection

TEXT = "".join(chr(97 + n % 26) for n in range(80))
RETRIES = 60
"""More often than a proxy here cuts."""


def echo(submit: Submit) -> tuple[list[int], str]:
    """Says the prompt, so that an answer tells whose it is."""
    return [*unpack_tokens(submit.prompt), 257], "stop"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is waited between two tries is not what is tried here."""
    monkeypatch.setattr(connection, "LONGEST_PAUSE_S", 0.02)


# --------------------------------------------------------------------------------------------- connections


def test_a_stream_goes_on_where_its_connection_broke() -> None:
    with serving(Loopback(script=saying(TEXT), pace_s=0.005)) as served:
        budgets = [0, 100, 700, 1500, 4000, 9000]
        with cutting(served.url, budgets) as proxy, Client(proxy.url, retries=3) as client:
            stream = client.stream("x", max_tokens=200)
            assert "".join(stream) == TEXT == stream.answer.text
            assert proxy.cuts == 6
        assert len(served.worker.submits) == 1


@pytest.mark.parametrize("seed", range(2))
def test_a_map_through_a_proxy_that_cuts_computes_each_answer_once(seed: int) -> None:
    rng = random.Random(seed)
    prompts = [f"{n} {'x' * rng.randrange(30)}" for n in range(12)]
    with serving(Loopback(script=echo, pace_s=0.001)) as served:
        budgets = [rng.choice((0, 1, 300, 2000, 6000)) for _ in range(RETRIES)]
        with cutting(served.url, budgets) as proxy, Client(proxy.url, retries=RETRIES) as client:
            answers = client.map(prompts, concurrency=5, max_tokens=100)
            assert proxy.cuts > 10
        assert [answer.text for answer in answers] == prompts
        assert len(served.worker.submits) == len(prompts)


def test_a_job_through_a_proxy_that_cuts_is_one_job() -> None:
    rng = random.Random(1)
    prompts = [f"prompt {n}" for n in range(10)]
    with serving(Loopback(script=echo)) as served:
        budgets = [rng.choice((0, 50, 200, 1000)) for _ in range(20)]
        with cutting(served.url, budgets) as proxy, Client(proxy.url) as client:
            results = client.submit(prompts, max_tokens=100).results(GIVE_UP_S)
            assert [one.text for one in results if isinstance(one, Answer)] == prompts
            assert proxy.cuts > 2
            assert len(client.jobs()) == 1
        assert len(served.worker.submits) == len(prompts)


def test_it_ends_when_there_are_no_more_tries() -> None:
    with serving(Loopback(script=saying(TEXT))) as served, cutting(served.url, [300] * 10) as proxy:
        with Client(proxy.url, retries=2) as client, pytest.raises(ClusterUnreachable, match="broke"):
            client.complete("x", max_tokens=200)
        assert proxy.cuts == 3


# ------------------------------------------------------------------------------------------------ gateways


def handed_over(first: Served, second: Served) -> Iterator[str]:
    """The text of a stream that loses its gateway after some of it."""
    with cutting(first.url) as proxy, Client(proxy.url, retries=RETRIES) as client:
        stream = client.stream("x", max_tokens=200)
        yield next(stream)
        yield next(stream)
        proxy.lead_to(second.url)
        proxy.cut()
        yield from stream


def test_a_stream_goes_on_at_the_successor_of_its_gateway() -> None:
    with (
        serving(Loopback(script=saying(TEXT), pace_s=0.02)) as first,
        serving(Loopback(script=saying(TEXT))) as second,
    ):
        assert "".join(handed_over(first, second)) == TEXT
        seeds = {submit.sampling.seed for served in (first, second) for submit in served.worker.submits}
        assert len(seeds) == 1, "or a sampled answer would be another one"


def test_two_answers_are_never_spliced() -> None:
    other = TEXT[:1] + TEXT[1:].upper()
    for text in (other, TEXT[:1]):
        with (
            serving(Loopback(script=saying(TEXT), pace_s=0.02)) as first,
            serving(Loopback(script=saying(text))) as second,
        ):
            given_out: list[str] = []
            with pytest.raises(ClusterUnreachable, match="a different one"):
                given_out.extend(handed_over(first, second))
            assert TEXT.startswith("".join(given_out))


# ------------------------------------------------------------------------------------- the client's process

SCRIPT = """
import sys
from baton.client import Client
with Client(sys.argv[1]) as client:
    if sys.argv[2] == "map":
        for answer in client.map([f"prompt {n}" for n in range(20)], key="nightly", max_tokens=50):
            print(answer.text)
    else:
        print(client.generate("a long answer, " * 7, key="mine", max_tokens=120).text)
"""


def begin(url: str, verb: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", SCRIPT, url, verb], stdout=subprocess.PIPE, text=True)


def test_a_client_that_was_killed_is_taken_up_by_the_next() -> None:
    """Each prompt has one answer, and was computed once, though two processes asked."""
    right = {"map": [f"prompt {n}" for n in range(20)], "generate": ["a long answer, " * 7]}
    worker = Loopback(script=echo, pace_s=0.03)

    def begun() -> set[str]:
        return {bytes(list(unpack_tokens(submit.prompt))).decode() for submit in worker.submits}

    with serving(worker, jobs={"max_running_lines": 4}, keys={"linger_s": 60.0}) as served:
        on_the_way = {"generate": right["generate"][0], "map": "prompt 5"}
        killed = {prompt: begin(served.url, verb) for verb, prompt in on_the_way.items()}
        for prompt, process in killed.items():
            wait(lambda prompt=prompt: prompt in begun())  # type: ignore[misc]
            process.send_signal(signal.SIGKILL)
            assert process.communicate(timeout=GIVE_UP_S)[0] == "", "it had not ended"
            assert process.returncode == -signal.SIGKILL
        successors = {verb: begin(served.url, verb) for verb in right}
        said = {verb: process.communicate(timeout=GIVE_UP_S)[0] for verb, process in successors.items()}
        assert {verb: text.splitlines() for verb, text in said.items()} == right
        assert len(worker.submits) == sum(map(len, right.values()))


# ------------------------------------------------------------------------------------------------ the order


@pytest.fixture(scope="module")
def echoing() -> Iterator[tuple[Served, list[int]]]:
    """Longer prompts take longer; how many ran when each began."""
    running: list[int] = []
    worker = Loopback(pace_s=0.001)
    with serving(worker) as served:

        def script(submit: Submit) -> tuple[list[int], str]:
            running.append(served.gateway.load().running)
            return echo(submit)

        worker.script = script
        yield served, running


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    prompts=st.lists(st.text("abc", min_size=1, max_size=12), max_size=12),
    concurrency=st.integers(1, 6),
)
def test_a_map_is_in_the_order_of_its_prompts_and_within_its_bound(
    echoing: tuple[Served, list[int]], prompts: list[str], concurrency: int
) -> None:
    served, running = echoing
    running.clear()

    async def ask() -> list[str]:
        async with AsyncClient(served.url) as client:
            return [answer.text for answer in await client.map(iter(prompts), concurrency=concurrency, max_tokens=50)]

    assert asyncio.run(ask()) == prompts
    assert max(running, default=0) <= min(concurrency, len(prompts))
    assert len(running) == len(prompts)
