"""The command `baton`. Owns: its commands, their options and exit codes. Never: does work of its own.

Exit codes: 0 done, 1 it failed, 2 it was asked wrongly (usage or configuration). What is expected to go wrong is told
in one or two lines on stderr; a traceback is a bug of ours. Answers go to stdout, everything about them to stderr.
"""

from __future__ import annotations

import sys
from importlib.metadata import version as installed_version
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from baton.common import env
from baton.common.errors import BatonError, ConfigError
from baton.common.kv.layout import Component
from baton.common.resolve import Layer, assignments_layer, environment_layer, file_layer, nested
from baton.deploy.jobs.command import app as jobs

OK, FAILED, MISUSED = 0, 1, 2

app = typer.Typer(
    name="baton",
    help="Serves large language models with prefill and decode on separate workers.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(jobs)
err = Console(stderr=True, highlight=False, soft_wrap=True)

Model = Annotated[str | None, typer.Option(help="Built-in name, Hugging Face directory, or .gguf file.")]
Prefill = Annotated[int | None, typer.Option(help="Prefill workers; 0: decode workers prefill themselves.")]
Decode = Annotated[int | None, typer.Option(help="Decode workers.")]
Host = Annotated[str | None, typer.Option(help="Where the gateway listens.")]
Port = Annotated[int | None, typer.Option(help="0: any free port.")]
Dtype = Annotated[str | None, typer.Option(help="float32 or bfloat16.")]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="YAML file with settings.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="Any setting of common/config.py, as group.name=value. May be repeated.", metavar="K=V"),
]
RayAddress = Annotated[str | None, typer.Option(help="An existing Ray cluster; without: one on this machine.")]
RunningRay = Annotated[str, typer.Option("--ray-address", help="The Ray that the cluster runs on.")]
Cluster = Annotated[str, typer.Option(help="Its name, of the setting `cluster`.")]
Worker = Annotated[str, typer.Argument(help="decode-0, say.")]
Url = Annotated[str | None, typer.Option(help="The gateway. Default: $BATON_URL, else http://127.0.0.1:8000.")]
AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]


@app.command()
def serve(
    model: Model = None,
    prefill: Prefill = None,
    decode: Decode = None,
    host: Host = None,
    port: Port = None,
    dtype: Dtype = None,
    config: ConfigFile = None,
    settings: Settings = None,
    ray_address: RayAddress = None,
) -> None:
    """Bring a cluster up and serve until Ctrl-C."""
    from baton.deploy.serve import serve as run_server

    layers = _layers(config, settings, _flags(model, prefill, decode, host, port, dtype))
    run_server(layers, ray_address, err)


@app.command()
def run(
    prompt: Annotated[str, typer.Argument(help='The prompt; "-" reads it from stdin.')],
    url: Url = None,
    local: Annotated[bool, typer.Option("--local", help="Bring a cluster up for this one prompt.")] = False,
    model: Model = None,
    config: ConfigFile = None,
    settings: Settings = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens to answer with.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0: always the likeliest token.")] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same answer.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text instead of answering it as a chat.")] = False,
) -> None:
    """Answer one prompt, streaming to the terminal."""
    from baton.deploy import ask

    params = ask.params(max_tokens=max_tokens, temperature=temperature, seed=seed)
    text = sys.stdin.read() if prompt == "-" else prompt
    layers = _own_cluster(local, config, settings, model)
    with ask.gateway(url or env.cluster_url(), layers, err) as gateway:
        ask.ask(gateway, text, params, err, raw=raw)


@app.command()
def chat(
    url: Url = None,
    local: Annotated[bool, typer.Option("--local", help="Bring a cluster up for this conversation.")] = False,
    model: Model = None,
    config: ConfigFile = None,
    settings: Settings = None,
    system: Annotated[str, typer.Option(help="What the model is told before everything else.")] = "",
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens of an answer.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0: always the likeliest token.")] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same answers.")] = None,
) -> None:
    """Talk with the model. Its KV stays where it is between turns. /help shows what else can be typed."""
    from baton.deploy import ask, chat

    params = ask.params(max_tokens=max_tokens, temperature=temperature, seed=seed)
    layers = _own_cluster(local, config, settings, model)
    with ask.gateway(url or env.cluster_url(), layers, err) as gateway:
        if not chat.run_chat(gateway, params, system, err):
            raise typer.Exit(FAILED)


@app.command()
def status(url: Url = None, as_json: AsJson = False) -> None:
    """Show workers, their load, lanes and pages."""
    from baton.deploy import show

    found = show.fetch_status(url or env.cluster_url())
    show.print_json(found) if as_json else show.print_status(found, Console(highlight=False))


@app.command()
def top(
    url: Url = None,
    interval: Annotated[float, typer.Option(min=0.1, max=60.0, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="One screen, as text, instead of a live one.")] = False,
) -> None:
    """Watch the cluster: load, pages by owner, lanes, latencies, the slowest answers. q ends it."""
    from baton.deploy import top as dashboard

    gateway = url or env.cluster_url()
    if once or not sys.stdout.isatty():
        before, now = dashboard.look_once(gateway, interval)
        Console(highlight=False).print(dashboard.screen(before, now, interval))
    else:
        dashboard.run_top(gateway, interval, Console(highlight=False))


@app.command()
def doctor(
    url: Annotated[str | None, typer.Option(help="Look at the cluster behind this gateway, too.")] = None,
    model: Model = None,
    prefill: Prefill = None,
    decode: Decode = None,
    host: Host = None,
    port: Port = None,
    config: ConfigFile = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Say what of this machine, or of a running cluster, is broken or slow, and what to do about it."""
    from baton.common.resolve import merge
    from baton.deploy import doctor as examination
    from baton.deploy import show

    merged, _ = merge(_layers(config, settings, _flags(model, prefill, decode, host, port, None)))
    findings = examination.examine_machine(merged, err.print)
    if url is not None:
        findings = chain(findings, examination.examine_cluster(url))
    if as_json:
        found = list(findings)
        show.print_json(found)
        right = examination.nothing_broken(found)
    else:
        right = examination.print_findings(findings, Console(highlight=False))
    if not right:
        raise typer.Exit(FAILED)


@app.command()
def kv(
    url: Url = None,
    as_json: AsJson = False,
    worker: Annotated[str | None, typer.Option(help="With --page: the worker it belongs to.")] = None,
    page: Annotated[int | None, typer.Option(help="Who holds this page, and what became of it before.")] = None,
    component: Annotated[
        Component | None, typer.Option(help="With --page: of which layers. Default: the model's first.")
    ] = None,
) -> None:
    """Show who owns the KV pages of every worker. Exit code 1 when a page is unaccounted for."""
    from baton.deploy import show

    gateway = url or env.cluster_url()
    if (worker is None) != (page is None):
        raise typer.BadParameter("--worker and --page belong together")
    if worker is not None and page is not None:
        typer.echo(show.fetch_page_owner(gateway, worker, page, component))
        return
    if component is not None:
        raise typer.BadParameter("--component needs --worker and --page: without them all are shown")
    found = show.fetch_status(gateway)
    show.print_json(found.details) if as_json else show.print_census(found, Console(highlight=False))
    if not show.all_accounted(found):
        raise typer.Exit(FAILED)


@app.command()
def handoffs(
    worker: Annotated[str, typer.Argument(help="decode-0, say: both ends of a hand-off keep its times.")],
    url: Url = None,
    as_json: AsJson = False,
    request: Annotated[
        str | None, typer.Option(help="Only those of this request: its X-Request-Id, or how that begins.")
    ] = None,
    last: Annotated[int, typer.Option(min=1, help="How many.")] = 20,
) -> None:
    """Show when what happened in the last hand-offs of a worker. With --request: in full."""
    from baton.deploy import show, show_handoffs

    found = show.fetch_handoffs(url or env.cluster_url(), worker)
    chosen = [one for one in found if one.request_id.startswith(request or "")][-last:]
    if request is not None and not chosen:
        raise BatonError(f"{worker} keeps {len(found)} hand-offs, none of a request {request!r}")
    console = Console(highlight=False)
    if as_json:
        show.print_json(chosen)
    elif request is None:
        show_handoffs.print_handoffs(worker, chosen, console)
    else:
        for one in chosen:
            show_handoffs.print_handoff(one, console)


@app.command()
def trace(
    url: Url = None,
    seconds: Annotated[float, typer.Option(min=0.1, max=60.0, help="How long to record.")] = 5.0,
    out: Annotated[Path, typer.Option(help="The file; ui.perfetto.dev opens it.")] = Path("baton-trace.json"),
) -> None:
    """Record what all workers do: steps, copies, regions on their way, hand-offs."""
    from baton.deploy import show

    recorded = show.fetch_trace(url or env.cluster_url(), seconds)
    try:
        out.write_bytes(recorded)
    except OSError as error:
        raise typer.BadParameter(f"cannot write {out}: {error}") from error
    err.print(f"{out}: {len(recorded)} bytes; open it at https://ui.perfetto.dev", markup=False)


@app.command()
def drain(worker: Worker, cluster: Cluster = "baton", ray_address: RunningRay = "auto") -> None:
    """Replace a worker when it has finished what it runs: it takes nothing new."""
    _replace_worker(worker, None, cluster, ray_address)


@app.command()
def flip(
    worker: Worker,
    role: Annotated[str, typer.Argument(help="prefill or decode.")],
    cluster: Cluster = "baton",
    ray_address: RunningRay = "auto",
) -> None:
    """Give a worker another role when it has finished what it runs. Its name stays."""
    _replace_worker(worker, role, cluster, ray_address)


def _replace_worker(worker: str, role: str | None, cluster: str, ray_address: str) -> None:
    from baton.common.ids import WorkerId
    from baton.deploy.launch import attach

    attach(cluster, ray_address).replace_worker(WorkerId(worker), role)
    wanted = f" as a {role} worker" if role else ""
    err.print(f"{worker} takes nothing new; when it has finished what it has, it begins anew{wanted}", markup=False)


@app.command()
def demo(
    model: Model = None,
    prefill: Prefill = None,
    decode: Decode = None,
    config: ConfigFile = None,
    settings: Settings = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens of each answer.")] = None,
) -> None:
    """Bring a cluster up, answer a few prompts, show where the time went, take it down."""
    from baton.deploy.demo import DEFAULT_MAX_TOKENS, run_demo

    layers = _layers(config, settings, _flags(model, prefill, decode, None, 0, None))
    run_demo(layers, Console(highlight=False), max_tokens or DEFAULT_MAX_TOKENS)


@app.command()
def calibrate(
    model: Model = None,
    dtype: Dtype = None,
    config: ConfigFile = None,
    settings: Settings = None,
    out: Annotated[Path, typer.Option(help="The cost file.")] = Path("baton-cost.json"),
) -> None:
    """Measure what steps and hand-offs take on this machine, for `baton plan`: a minute, best while it is idle."""
    from baton.deploy.planner.calibrate import calibrate as measure
    from baton.deploy.planner.command import told_cost, write_cost
    from baton.deploy.serve import decide

    cost = measure(decide(_layers(config, settings, _flags(model, None, None, None, None, dtype)), err), err.print)
    write_cost(cost, out)
    typer.echo(told_cost(cost))
    err.print(f"{out} written", markup=False)


@app.command()
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
    """How many prefill and decode workers a workload needs, or whether not to disaggregate it."""
    from baton.common.resolve import merge
    from baton.deploy.planner.command import Asked, run_plan

    asked = Asked(
        trace=trace, slo=slo, cost=cost, target=target, workers=workers, rate=rate, requests=requests,
        scale_lengths=scale_lengths,
    )  # fmt: skip
    merged, _ = merge(_layers(config, settings, {}))
    typer.echo(run_plan(asked, merged, out, as_json, err.print))


@app.command()
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
    api_key: Annotated[str | None, typer.Option(help="For servers that want one.")] = None,
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
    """Load any OpenAI-compatible server, and say what came of it; or whether a split is better for this load."""
    from baton.deploy import show
    from baton.deploy.bench import command

    asked = command.Asked(
        trace=trace, lengths=lengths, scale_lengths=scale_lengths, rates=rates, at_once=at_once, requests=requests,
        slo=slo, target=target, seed=seed, model=served_model, api_key=api_key, ignore_eos=not respect_eos,
    )  # fmt: skip
    command.check_files(out, picture, asked)
    if compare is None:
        if config is not None or settings or (model, prefill, decode) != (None, None, None):
            raise typer.BadParameter("--model, --prefill, --decode, --config and --set need --compare colocated")
        result = command.bench_url(url or env.cluster_url(), asked, err)
    else:
        if url is not None:
            raise typer.BadParameter("--compare brings clusters of its own up: without --url")
        layers = _layers(config, settings, _flags(model, prefill, decode, None, 0, None))
        result = command.bench_splits(layers, asked, err)
    command.save(result, out, picture)
    if as_json:
        show.print_json(result)
    else:
        command.tell(result, Console(highlight=False))


@app.command()
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
    """Run simulated clusters: the real code under drawn faults, every KV page checked after every event."""
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


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(f"baton {installed_version('baton-pd')}")


def main() -> None:
    """The console script."""
    sys.exit(run_command(sys.argv[1:]))


def run_command(arguments: list[str]) -> int:
    """Runs one command and returns its exit code."""
    try:
        app(arguments, prog_name="baton")
    except SystemExit as end:  # how the command line library ends, well or with a usage error (2)
        return end.code if isinstance(end.code, int) else OK
    except ConfigError as error:
        err.print(f"baton: {error}", markup=False)
        return MISUSED
    except BatonError as error:
        err.print(f"baton: {error}", markup=False)
        return FAILED
    return OK


def _own_cluster(local: bool, config: Path | None, settings: list[str] | None, model: str | None) -> list[Layer] | None:
    """The settings of one that is brought up for a command; None: one that runs is asked."""
    if local:
        return _layers(config, settings, _flags(model, None, None, None, 0, None))
    if config is not None or settings or model is not None:
        raise typer.BadParameter("--model, --config and --set need --local: a running cluster has its own")
    return None


def _flags(
    model: str | None,
    prefill: int | None,
    decode: int | None,
    host: str | None,
    port: int | None,
    dtype: str | None,
) -> dict[str, Any]:
    """The options that are settings, by the settings' names; those not given are left out."""
    named = {
        "model.model": model,
        "prefill": prefill,
        "decode": decode,
        "gateway.host": host,
        "gateway.port": port,
        "model.dtype": dtype,
    }
    return {name: value for name, value in named.items() if value is not None}


def _layers(config: Path | None, settings: list[str] | None, flags: dict[str, Any]) -> list[Layer]:
    """Later ones win: file, environment, --set, options."""
    layers = [file_layer(config)] if config is not None else []
    return [*layers, environment_layer(), assignments_layer(settings or []), Layer("command line", nested(flags))]


if __name__ == "__main__":
    main()
