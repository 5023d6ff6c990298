"""One prompt from the terminal: the answer streams to stdout, where its time went goes to stderr."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence

from rich.console import Console

from baton.common.resolve import Layer
from baton.deploy.client import Answer, Client, Params, Prompt
from baton.deploy.show import timing_line


def params(*, max_tokens: int | None, temperature: float | None, seed: int | None) -> Params:
    """Those that were given."""
    chosen = Params()
    if max_tokens is not None:
        chosen["max_tokens"] = max_tokens
    if temperature is not None:
        chosen["temperature"] = temperature
    if seed is not None:
        chosen["seed"] = seed
    return chosen


def ask(url: str, text: str, chosen: Params, console: Console, *, raw: bool) -> None:
    """Raises RequestError or ClusterUnreachable."""
    prompt: Prompt = text if raw else [{"role": "user", "content": text}]
    with Client(url) as client:
        answer = stream_to_stdout(client, prompt, chosen)
    console.print(f"[dim]{timing_line(answer)}[/]")


@contextlib.contextmanager
def gateway(url: str, layers: Sequence[Layer] | None, console: Console) -> Iterator[str]:
    """The address of the one at `url`, or, with `layers`, of a cluster of its own that ends with the `with`."""
    if layers is None:
        yield url
        return
    from baton.deploy.serve import decide, running_cluster  # Ray: only needed here

    with running_cluster(decide(layers, console), console) as handle:
        yield handle.gateway_url


def stream_to_stdout(client: Client, prompt: Prompt, chosen: Params) -> Answer:
    with client.stream(prompt, **chosen) as stream:
        for part in stream:
            sys.stdout.write(part)
            sys.stdout.flush()
        sys.stdout.write("\n")
        return stream.answer
