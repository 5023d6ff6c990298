"""`make demo`: a cluster on this machine, a handful of prompts, and the proof of what happened.

Owns: the prompts and the order of what is shown. Exit code 0 means: every prompt was answered through a hand-off, and
afterwards every page of every worker was free or cached.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from baton.common.clock import MonotonicClock
from baton.common.errors import BatonError
from baton.common.resolve import Layer
from baton.deploy.client import Answer, Client, Message
from baton.deploy.serve import decide, running_cluster
from baton.deploy.show import Wrapped, all_idle, print_census, print_lanes, print_timings
from baton.deploy.status import GatewayStatus

DEFAULT_MAX_TOKENS = 96
IDLE_WAIT_S = 15.0

PROMPTS: tuple[tuple[str, tuple[Message, ...]], ...] = (
    ("capital", ({"role": "user", "content": "What is the capital of France?"},)),
    ("sky", ({"role": "user", "content": "Explain in two sentences why the sky is blue."},)),
    (
        "follow-up",
        (
            {"role": "user", "content": "What is the capital of France?"},
            {"role": "assistant", "content": "The capital of France is Paris."},
            {"role": "user", "content": "What is it famous for?"},
        ),
    ),
    (
        "summary",
        (
            {
                "role": "user",
                "content": "Summarize in one sentence: A relay race is a race in which the members of a team take "
                "turns running parts of a circuit. Each runner carries a baton and hands it to the next within a zone "
                "of twenty metres. A team that drops the baton may pick it up again, but a team that hands it over "
                "outside the zone is disqualified.",
            },
        ),
    ),
    ("code", ({"role": "user", "content": "Write a Python function that reverses a string."},)),
)


class DemoFailed(BatonError):
    """The cluster answered, but not as it should."""


def run_demo(layers: Sequence[Layer], console: Console, max_tokens: int = DEFAULT_MAX_TOKENS) -> None:
    """Raises DemoFailed when an answer did not come through a hand-off, or pages are still held at the end."""
    config = decide(layers, console)
    with running_cluster(config, console) as handle:
        console.print()
        with Client(handle.gateway_url) as client:
            answers = [(name, _answer(client, name, messages, max_tokens, console)) for name, messages in PROMPTS]
            status = _wait_until_idle(client)
        print_timings(answers, console)
        console.print()
        print_lanes(status, console)
        console.print()
        print_census(status, console)
        console.print()
    if config.prefill and not all(answer.timeline.transferred_tokens for _, answer in answers):
        raise DemoFailed("an answer did not come through a hand-off")
    if not all_idle(status):
        raise DemoFailed("some pages are neither free nor cached")


def _answer(client: Client, name: str, messages: Sequence[Message], max_tokens: int, console: Console) -> Answer:
    console.print(f"[bold cyan]{name}[/]  ", end="")
    console.print(messages[-1]["content"], style="cyan", markup=False)
    with client.stream(messages, max_tokens=max_tokens, temperature=0) as stream:
        text = Wrapped(lambda piece: console.out(piece, end="", highlight=False), console.width)
        for part in stream:
            text.write(part)
        text.finish()
        console.print("\n")
        return stream.answer


def _wait_until_idle(client: Client) -> GatewayStatus:
    """The last acknowledgements travel behind the last token: the workers have a moment to let go."""
    clock = MonotonicClock()
    deadline_s = clock.now() + IDLE_WAIT_S
    status = client.status()
    while not all_idle(status) and clock.now() < deadline_s:
        status = client.status()
    return status
