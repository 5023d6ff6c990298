"""The shell of `baton bench`: loads one server, or a cluster of its own split and then colocated, and tells.

Owns: the order in which it is done, and the files. Never: a number of its own.

A load at a rate begins when the one before has ended, with other prompts: nothing of it is found in a cache. Two
systems are asked the same. Before the first load some requests warm the system up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
from rich.console import Console

from baton.common.config import ClusterConfig
from baton.common.errors import ConfigError
from baton.common.resolve import Layer
from baton.deploy.bench.load import Sent, Target, first_model, offer
from baton.deploy.bench.report import Point, point_of, remarks, table_of, verdict
from baton.deploy.bench.workload import asks_of, parse_lengths, parse_rates, same_lengths
from baton.deploy.charts import Cells, Chart, Line, check_kind, write
from baton.deploy.client import ClusterUnreachable, gateway_url
from baton.deploy.planner.outcome import Slo, parse_slo, told_s
from baton.deploy.planner.trace_files import read_trace_file
from baton.deploy.planner.traces import Trace, at_rate, with_lengths
from baton.deploy.show_parts import print_table

WARM_UP = 4
DEFAULT_TARGET = 0.9


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What `baton bench` was told. `at_once`: instead of rates, as many as are open at any time."""

    trace: Path | None = None
    lengths: str = "512:128"
    scale_lengths: float = 1.0
    rates: str = "1"
    at_once: int | None = None
    requests: int = 100
    slo: str | None = None
    target: float = DEFAULT_TARGET
    seed: int = 0
    model: str | None = None
    api_key: str | None = None
    ignore_eos: bool = True


class Load(msgspec.Struct, frozen=True):
    """What is asked of every system."""

    trace: Trace
    rates: tuple[float | None, ...]
    slo: Slo | None


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The saved JSON."""

    asked: Asked
    points: list[Point]
    verdict: str = ""


def load_of(asked: Asked) -> Load:
    """Raises ConfigError, before anything is started."""
    if not 0 < asked.scale_lengths < float("inf"):
        raise ConfigError("--scale-lengths", asked.scale_lengths, "must be positive and finite")
    if not 0 < asked.target <= 1:
        raise ConfigError("--target", asked.target, "is a share of the requests", f"--target {DEFAULT_TARGET}")
    trace = _trace_of(asked)
    if asked.scale_lengths != 1.0:
        trace = with_lengths(trace, asked.scale_lengths)
    rates: tuple[float | None, ...] = (None,) if asked.at_once is not None else parse_rates(asked.rates)
    return Load(trace, rates, parse_slo(asked.slo) if asked.slo is not None else None)


def bench_url(url: str, asked: Asked, console: Console) -> Result:
    """Of what is there. Raises ClusterUnreachable, ConfigError."""
    load = load_of(asked)
    return Result(asked=asked, points=_measure("server", url, load, asked, console))


def bench_splits(layers: Sequence[Layer], asked: Asked, console: Console) -> Result:
    """Of a cluster on this machine as it is configured, then of as many workers that compute prompts themselves."""
    from baton.deploy.serve import decide, running_cluster  # Ray: only needed here

    load = load_of(asked)
    config = decide(layers, console)
    if not config.prefill:
        raise ConfigError("prefill", 0, "there is no split to compare with", "--prefill 1")
    points: list[Point] = []
    for name, one in _systems(config):
        console.print(f"\n[bold]{name}[/]")
        with running_cluster(one, console) as handle:
            points += _measure(name, handle.gateway_url, load, asked, console)
    return Result(asked=asked, points=points, verdict=verdict(points, load.slo, asked.target))


def tell(result: Result, console: Console) -> None:
    console.print()
    print_table(table_of(result.points), console)
    for remark in remarks(result.points):
        console.print(remark, markup=False, soft_wrap=True)
    if result.verdict:
        console.print(f"\n[bold]{result.verdict}[/]", soft_wrap=True)


def check_files(out: Path | None, picture: Path | None, asked: Asked) -> None:
    """Raises ConfigError for what could not be written in the end."""
    if out is not None and not out.absolute().parent.is_dir():
        raise ConfigError("--out", str(out), "there is no such directory")
    if picture is not None:
        check_kind(picture)
        if asked.slo is None:
            raise ConfigError("--picture", str(picture), "shows promises that are kept", "--slo ttft=2s,itl=50ms")
        if asked.at_once is not None:
            raise ConfigError("--picture", str(picture), "shows rates", "--rates 1,2,4 instead of --at-once")


def save(result: Result, out: Path | None, picture: Path | None) -> None:
    """Raises ConfigError."""
    if out is not None:
        try:
            out.write_bytes(msgspec.json.format(msgspec.json.encode(result)) + b"\n")
        except OSError as error:
            raise ConfigError("--out", str(out), f"cannot be written: {error.strerror}") from error
    if picture is not None:
        _draw(result, picture)


def _trace_of(asked: Asked) -> Trace:
    if asked.trace is None:
        prompt_tokens, output_tokens = parse_lengths(asked.lengths)
        return same_lengths(prompt_tokens, output_tokens, asked.requests, asked.seed)
    return read_trace_file(asked.trace, asked.requests)


def _systems(config: ClusterConfig) -> Iterator[tuple[str, ClusterConfig]]:
    workers = config.prefill + config.decode
    yield f"{config.prefill} prefill + {config.decode} decode", config
    yield f"{workers} colocated", replace(config, prefill=0, decode=workers)


def _measure(system: str, url: str, load: Load, asked: Asked, console: Console) -> list[Point]:
    target = _target(url, asked)
    points = []
    for number, rate in enumerate(load.rates):
        trace = load.trace if rate is None else at_rate(load.trace, rate)
        asks = asks_of(trace, f"{asked.seed}/{number}")
        if not number:
            asyncio.run(offer(target, asks_of(trace, f"{asked.seed}/warm")[:WARM_UP], 1, lambda ended: None))
        with _progress(len(asks), rate, console) as told:
            sent: list[Sent] = asyncio.run(offer(target, asks, asked.at_once, told))
        points.append(point_of(system, rate, sent, load.slo))
    return points


def _target(url: str, asked: Asked) -> Target:
    base = gateway_url(url)
    try:
        model = asked.model or asyncio.run(first_model(base, asked.api_key))
    except httpx.HTTPStatusError as error:
        raise ClusterUnreachable(f"{base} answers HTTP {error.response.status_code} to /v1/models") from error
    except (httpx.HTTPError, msgspec.DecodeError, IndexError) as error:
        raise ClusterUnreachable(f"no OpenAI-compatible server answers at {base}: {error}") from error
    extra: dict[str, Any] = {"temperature": 0.0}
    if asked.ignore_eos:
        extra["ignore_eos"] = True
    return Target(base, model, asked.api_key, extra)


@contextmanager
def _progress(count: int, rate: float | None, console: Console) -> Iterator[Callable[[int], None]]:
    """A line that says how far it is, where a person watches."""
    what = f"{count} requests" + (f" at {rate:g} per second" if rate is not None else "")
    if not console.is_terminal:
        console.print(what, markup=False)
        yield lambda ended: None
        return
    with console.status(what) as status:
        yield lambda ended: status.update(f"{what}: {ended} answered")
    console.print(f"[dim]{what}: done[/]")


def _draw(result: Result, path: Path) -> None:
    systems = list(dict.fromkeys(point.system for point in result.points))
    lines = [
        Line(name, [(one.rate or 0.0, one.attainment or 0.0) for one in result.points if one.system == name])
        for name in systems
    ]
    asked = result.asked
    workload = asked.trace.name if asked.trace is not None else asked.lengths
    names = "system", "requests/s", "TTFT p50", "TTFT p99", "ITL p99", "E2E p50", "kept", "goodput"
    rows = [
        [
            point.system,
            "-" if point.rate is None else f"{point.rate:g}",
            *(
                "-" if value is None else told_s(value)
                for value in (point.ttft.p50, point.ttft.p99, point.itl.p99, point.e2e.p50)
            ),
            f"{point.attainment or 0.0:.0%}",
            f"{point.goodput or 0.0:.2f}",
        ]
        for point in result.points
    ]
    text = "\n".join([result.verdict, *remarks(result.points)])
    write(Chart(f"{workload}: {asked.slo}", lines, asked.target), text, Cells(names, rows), path)
