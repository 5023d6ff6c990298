"""Bringing a cluster up from the terminal, and taking it down again: what `serve`, `run --local` and `demo` share.

Owns: what a person sees meanwhile. Never: decides a setting (`resolve`) or starts a process (`launch`).
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

from rich.console import Console

from baton.common.clock import MonotonicClock
from baton.common.config import FAKE_MODEL, ClusterConfig
from baton.common.model.spec import resolve_source
from baton.common.resolve import Layer, ModelFacts, Resolved, merge, resolve
from baton.deploy.launch import ClusterHandle, launch
from baton.deploy.tokenizer import FakeModelInfo

WATCH_INTERVAL_S = 1.0
DRAIN_S = 10.0
FAKE_NUM_PAGES = 4096


def decide(layers: Sequence[Layer], console: Console) -> ClusterConfig:
    """The configuration, shown with what was decided and why. Raises ConfigError."""
    progress = Progress(console)

    def find_model(spec: str) -> ModelFacts:
        if spec == FAKE_MODEL:
            return FakeModelInfo()
        resolve_source(spec)  # cheap, and most mistakes end here; what follows imports a large library
        progress("reading the model's configuration")
        from baton.common.model.loading import model_info

        return model_info(spec, progress)

    if merge(layers)[0].model.model == FAKE_MODEL:  # its pages are tiny: bytes would make millions of them
        layers = [Layer("the fake model", {"kv": {"num_pages": FAKE_NUM_PAGES}}), *layers]
    resolved = resolve(layers, find_model)
    show_decisions(resolved, console)
    return resolved.config


def show_decisions(resolved: Resolved, console: Console) -> None:
    config = resolved.config
    console.print(
        f"[bold]{config.model.model}[/] in {config.model.dtype}: "
        f"{config.prefill} prefill, {config.decode} decode, pages of {config.kv.page_size} tokens"
    )
    for decision in resolved.decisions:
        value = ", ".join(map(str, decision.value)) if isinstance(decision.value, tuple) else decision.value
        console.print(f"  {decision.field} = {value}  [dim]({decision.why})[/]")


class Progress:
    """Lines of loading, each with the time since the start: `12.3 s  decode-0: loading weights`."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._clock = MonotonicClock()
        self._started_s = self._clock.now()

    def __call__(self, line: str) -> None:
        self._console.print(f"[dim]{self._clock.now() - self._started_s:6.1f} s[/]  ", end="")
        self._console.print(line, markup=False, soft_wrap=True)


@contextlib.contextmanager
def running_cluster(config: ClusterConfig, console: Console, ray_address: str | None = None) -> Iterator[ClusterHandle]:
    """A cluster for the time of the block."""
    handle = launch(config, ray_address=ray_address, on_progress=Progress(console))
    try:
        yield handle
    finally:
        console.print("[dim]shutting down[/]")
        handle.shutdown()


def serve(
    layers: Sequence[Layer],
    ray_address: str | None,
    console: Console,
    before: Callable[[ClusterConfig], None] | None = None,
) -> None:
    """Until Ctrl-C or SIGTERM. A second one does not wait for a clean end. `before` may refuse what was decided."""
    config = decide(layers, console)
    if before is not None:
        before(config)
    with running_cluster(config, console, ray_address) as handle:
        _show_how_to_ask(handle, console)
        with told_to_stop() as stop:
            _watch(handle, stop, console)
        console.print(f"[dim]finishing what runs, at most {DRAIN_S:.0f} s (Ctrl-C: do not wait)[/]")
        handle.drain(DRAIN_S)


def _show_how_to_ask(handle: ClusterHandle, console: Console) -> None:
    url = handle.gateway_url
    name = handle.plan.config.model.model
    if name != FAKE_MODEL:
        name = resolve_source(name).name
    console.print(f"\nServing [bold]{name}[/] at [bold]{' '.join(handle.gateway_urls)}[/]   (Ctrl-C to stop)\n")
    body = f'{{"model": "{name}", "messages": [{{"role": "user", "content": "Say hello."}}]}}'
    asked = f"curl {url}/v1/chat/completions -H 'Content-Type: application/json'"
    if handle.plan.config.gateway.api_keys_file:
        console.print("  export BATON_API_KEY=...      # of `baton keys new`", markup=False)
        asked += ' -H "Authorization: Bearer $BATON_API_KEY"'
    console.print(f"  {asked} -d '{body}'", markup=False)
    console.print(f'  baton run --url {url} "Say hello."\n', markup=False)


def _watch(handle: ClusterHandle, stop: threading.Event, console: Console) -> None:
    """Tells of every worker that comes or goes."""
    shown = {seat.worker: (seat.state, seat.incarnation) for seat in handle.status().seats}
    while not stop.wait(WATCH_INTERVAL_S):
        for seat in handle.status().seats:
            now = (seat.state, seat.incarnation)
            if shown.get(seat.worker) != now:
                shown[seat.worker] = now
                why = "" if seat.state == "live" else f"  {seat.detail}"
                console.print(f"{seat.worker}@{seat.incarnation}: {seat.state}{why}", markup=False)


@contextlib.contextmanager
def told_to_stop() -> Iterator[threading.Event]:
    """Set by the first SIGINT or SIGTERM; the second one interrupts as usual."""
    stop = threading.Event()
    signals = (signal.SIGINT, signal.SIGTERM)
    usual = {number: signal.getsignal(number) for number in signals}

    def on_signal(number: int, frame: FrameType | None) -> None:
        stop.set()
        for each in signals:
            signal.signal(each, usual[each])

    for number in signals:
        signal.signal(number, on_signal)
    try:
        yield stop
    finally:
        for number in signals:
            signal.signal(number, usual[number])
