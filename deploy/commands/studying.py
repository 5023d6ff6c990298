"""`baton calibrate, plan, bench, sim`: find out what a cluster does, or would do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from baton.common import env
from baton.deploy.commands.options import (
    FAILED,
    AsJson,
    ConfigFile,
    Decode,
    Dtype,
    Model,
    Prefill,
    Settings,
    Url,
    err,
    flags_of,
    layers_of,
)


def calibrate(
    model: Model = None,
    dtype: Dtype = None,
    config: ConfigFile = None,
    settings: Settings = None,
    out: Annotated[Path, typer.Option(help="The cost file.")] = Path("baton-cost.json"),
) -> None:
    """Measure this machine, for `baton plan`. What steps and hand-offs take: two minutes, best while it is idle."""
    from baton.deploy.planner.calibrate import calibrate as measure
    from baton.deploy.planner.command import told_cost, write_cost
    from baton.deploy.serve import decide

    cost = measure(decide(layers_of(config, settings, flags_of(model, None, None, None, None, dtype)), err), err.print)
    write_cost(cost, out)
    typer.echo(told_cost(cost))
    err.print(f"{out} written", markup=False)


def plan(
    trace: Annotated[Path, typer.Option(help="Mooncake's JSONL, Azure's CSV of 2023, or Baton's JSONL.")],
    slo: Annotated[str, typer.Option(help="ttft=2s,itl=50ms; also tpot, the mean of a request's gaps.")],
    workers: Annotated[int | None, typer.Option(help="How to split so many. Without: how many are needed.")] = None,
    rate: Annotated[float | None, typer.Option(help="Requests/s they are needed for. Default: the trace's.")] = None,
    cost: Annotated[Path, typer.Option(help="Of `baton calibrate`.")] = Path("baton-cost.json"),
    target: Annotated[float, typer.Option(help="Share of the requests whose promises must be kept.")] = 0.9,
    requests: Annotated[int, typer.Option(min=2, help="How many of the trace, from its beginning.")] = 2000,
    scale_lengths: Annotated[float, typer.Option(help="Prompts and answers so many times as long.")] = 1.0,
    config: ConfigFile = None,
    settings: Settings = None,
    out: Annotated[Path | None, typer.Option(help="A picture: .html, .svg or .png.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say how many workers a workload needs. Prefill and decode, or not to disaggregate at all."""
    from baton.common.resolve import merge
    from baton.deploy.planner.command import Asked, run_plan

    asked = Asked(
        trace=trace, slo=slo, cost=cost, target=target, workers=workers, rate=rate, requests=requests,
        scale_lengths=scale_lengths,
    )  # fmt: skip
    merged, _ = merge(layers_of(config, settings, {}))
    typer.echo(run_plan(asked, merged, out, as_json, err.print))


def bench(
    url: Url = None,
    compare: Annotated[
        Literal["colocated"] | None,
        typer.Option(help="On this machine: split as configured, and as many workers that compute prompts themselves."),
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Replay this one; formats as for `baton plan`.")] = None,
    lengths: Annotated[str, typer.Option(help="Without a trace: tokens of each prompt and answer.")] = "512:128",
    scale_lengths: Annotated[float, typer.Option(help="Prompts and answers so many times as long.")] = 1.0,
    rates: Annotated[str, typer.Option(help="Requests per second, one load after the other: 1,2,4.")] = "1",
    at_once: Annotated[int | None, typer.Option(min=1, help="Instead of rates: so many open at any time.")] = None,
    requests: Annotated[int, typer.Option(min=2, help="Of each load.")] = 100,
    slo: Annotated[str | None, typer.Option(help="What is promised: ttft=2s,itl=50ms; also tpot.")] = None,
    target: Annotated[float, typer.Option(help="Share of the requests whose promises must be kept.")] = 0.9,
    seed: Annotated[int, typer.Option(min=0, help="Draws the prompts.")] = 0,
    served_model: Annotated[str | None, typer.Option(help="Default: the first that the server names.")] = None,
    respect_eos: Annotated[bool, typer.Option("--respect-eos", help="Answers may end by themselves.")] = False,
    model: Model = None,
    prefill: Prefill = None,
    decode: Decode = None,
    config: ConfigFile = None,
    settings: Settings = None,
    out: Annotated[Path | None, typer.Option(help="The numbers, as JSON.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Promises kept at each rate: .html, .svg or .png.")] = None,
    as_json: AsJson = False,
) -> None:
    """Load an OpenAI-compatible server and measure. Or whether a split is better for this load."""
    from baton.deploy import show
    from baton.deploy.bench import command

    asked = command.Asked(
        trace=trace, lengths=lengths, scale_lengths=scale_lengths, rates=rates, at_once=at_once, requests=requests,
        slo=slo, target=target, seed=seed, model=served_model, api_key=env.api_key(), ignore_eos=not respect_eos,
    )  # fmt: skip
    command.check_files(out, picture, asked)
    if compare is None:
        if config is not None or settings or (model, prefill, decode) != (None, None, None):
            raise typer.BadParameter("--model, --prefill, --decode, --config and --set need --compare colocated")
        result = command.bench_url(url or env.cluster_url(), asked, err)
    else:
        if url is not None:
            raise typer.BadParameter("--compare brings clusters of its own up: without --url")
        layers = layers_of(config, settings, flags_of(model, prefill, decode, None, 0, None))
        result = command.bench_splits(layers, asked, err)
    command.save(result, out, picture)
    if as_json:
        show.print_json(result)
    else:
        command.tell(result, Console(highlight=False))


def sim(
    seed: Annotated[int, typer.Option(min=0, help="The first (or only) seed.")] = 0,
    seeds: Annotated[int, typer.Option(min=1, help="How many.")] = 1,
    jobs: Annotated[int, typer.Option(min=1, help="How many processes share the seeds.")] = 1,
    scenario: Annotated[
        str | None, typer.Option(help="A named world, instead of a random one.", metavar="NAME")
    ] = None,
    listed: Annotated[bool, typer.Option("--list", help="Name the scenarios, and what each is about.")] = False,
    traced: Annotated[bool, typer.Option("--trace", help="Replay one seed, and tell all that happens.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="With --trace: into this file, as JSON lines, and a picture beside it.")
    ] = None,
    shrink: Annotated[bool, typer.Option("--shrink", help="What a failing seed fails with, and without.")] = False,
    without: Annotated[str, typer.Option(help="Parts to leave out, as --shrink prints them: r3,c0,crash1,loss.")] = "",
) -> None:
    """Run simulated clusters under drawn faults. The real code; every KV page is checked after every event."""
    from baton.deploy.sim import command

    which = command.Which(scenario, tuple(part for part in without.split(",") if part))
    which.check()
    if out is not None and not traced:
        raise typer.BadParameter("--out needs --trace")
    if (traced or shrink) and seeds != 1:
        raise typer.BadParameter("--trace and --shrink are for one seed")
    if shrink and scenario is not None:
        raise typer.BadParameter("--shrink makes random worlds small; a scenario is small already")
    if listed:
        command.list_scenarios(typer.echo)
        return
    if shrink:
        right = command.make_small(seed, which, typer.echo)
    elif traced:
        try:
            right = command.trace(seed, which, out, typer.echo)
        except OSError as error:
            raise typer.BadParameter(f"cannot write {out}: {error}") from error
    else:
        right = command.run_many(range(seed, seed + seeds), which, jobs, typer.echo)
    if not right:
        raise typer.Exit(FAILED)
