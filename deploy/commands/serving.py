"""`baton serve, deploy, down, leave, run, chat, demo, doctor, drain, flip`: bring a cluster up, use it, mend it."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console

from baton.common import env
from baton.common.resolve import Layer
from baton.deploy.commands.options import (
    FAILED,
    AsJson,
    Cluster,
    ConfigFile,
    Decode,
    Doctor,
    DrainS,
    Dtype,
    Host,
    Model,
    Port,
    Prefill,
    RayAddress,
    RayOrJobs,
    RunningRay,
    Settings,
    Url,
    Worker,
    err,
    flags_of,
    layers_of,
    own_cluster,
)

Within = Annotated[float, typer.Option(help="Most time to wait for it; it goes on without you.")]


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
    doctor: Doctor = False,
) -> None:
    """Bring a cluster up and serve until Ctrl-C."""
    from baton.deploy.doctor.command import refuse_unfit
    from baton.deploy.serve import serve as run_server

    layers = layers_of(config, settings, flags_of(model, prefill, decode, host, port, dtype))
    run_server(layers, ray_address, err, (lambda wanted: refuse_unfit(wanted, ray_address, err)) if doctor else None)


def deploy(
    address: RayOrJobs = "auto",
    model: Model = None,
    prefill: Prefill = None,
    decode: Decode = None,
    host: Host = None,
    port: Port = None,
    dtype: Dtype = None,
    config: ConfigFile = None,
    settings: Settings = None,
    replace: Annotated[bool, typer.Option("--replace", help="End one that runs with other settings.")] = False,
    drain_s: DrainS = 30.0,
    keep: Annotated[
        str | None, typer.Option(metavar="URL", help="Stay, and do it again when this gateway is silent for a minute.")
    ] = None,
    doctor: Doctor = False,
) -> None:
    """Bring a cluster up on a Ray that runs, and leave it there. Does nothing where it is there already."""
    from baton.deploy import standing
    from baton.deploy.doctor.command import refuse_unfit
    from baton.deploy.serve import Progress, decide, told_to_stop

    layers = layers_of(config, settings, flags_of(model, prefill, decode, host, port, dtype))

    def stand_up() -> None:
        if standing.is_jobs_api(address):
            options = [f"--drain-s={drain_s}", *(["--replace"] if replace else []), *(["--doctor"] if doctor else [])]
            standing.submit(address, standing.deploy_command(layers, options), typer.echo)
            return
        wanted, say = decide(layers, err), Progress(err)
        if doctor:
            refuse_unfit(wanted, address, err)
        handle = standing.stand_up(wanted, address, replace=replace, drain_s=drain_s, on_progress=say)
        typer.echo("\n".join(standing.gateway_urls(handle)))

    if keep is None:
        stand_up()
        return
    with told_to_stop() as stop:
        standing.keep(stand_up, keep, stop, err.print)


def down(cluster: Cluster = "baton", address: RayOrJobs = "auto", drain_s: DrainS = 30.0) -> None:
    """End a cluster that `deploy` brought up, and leave nothing of it on that Ray."""
    from baton.deploy import standing

    if standing.is_jobs_api(address):
        command = ["baton", "down", f"--cluster={cluster}", f"--drain-s={drain_s}"]
        standing.submit(address, command, typer.echo)
        return
    there = standing.take_down(cluster, address, drain_s)
    err.print(f"{cluster} is down" if there else f"nothing named {cluster} runs there", markup=False)


def leave(
    cluster: Cluster = "baton",
    address: RunningRay = "auto",
    within_s: Annotated[float, typer.Option(help="Most time for it.")] = 120.0,
) -> None:
    """Off this node, before it goes: what runs here is finished, or goes on elsewhere."""
    from baton.deploy.leaving import leave as leave_node

    if not leave_node(cluster, address, within_s, _note):
        raise typer.Exit(FAILED)


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
    layers = own_cluster(local, config, settings, model)
    with ask.gateway(url or env.cluster_url(), layers, err) as gateway:
        ask.ask(gateway, text, params, err, raw=raw)


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
    layers = own_cluster(local, config, settings, model)
    with ask.gateway(url or env.cluster_url(), layers, err) as gateway:
        if not chat.run_chat(gateway, params, system, err):
            raise typer.Exit(FAILED)


def demo(
    model: Model = None,
    prefill: Prefill = None,
    decode: Decode = None,
    config: ConfigFile = None,
    settings: Settings = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens of each answer.")] = None,
) -> None:
    """See it work: a cluster, a few answers, where the time went."""
    from baton.deploy.demo import DEFAULT_MAX_TOKENS, run_demo

    layers = layers_of(config, settings, flags_of(model, prefill, decode, None, 0, None))
    run_demo(layers, Console(highlight=False), max_tokens or DEFAULT_MAX_TOKENS)


def doctor(
    url: Annotated[str | None, typer.Option(help="Look at the cluster behind this gateway, too.")] = None,
    ray_address: Annotated[
        str | None,
        typer.Option(help="Look at every host of this Ray, as one of its nodes; or its Jobs API: http://HEAD:8265."),
    ] = None,
    model: Model = None,
    prefill: Prefill = None,
    decode: Decode = None,
    host: Host = None,
    port: Port = None,
    config: ConfigFile = None,
    settings: Settings = None,
    measure: Annotated[bool, typer.Option(help="Measure the lanes, with probe processes.")] = True,
    all_pairs: Annotated[bool, typer.Option("--all-pairs", help="Every pair of hosts, however many.")] = False,
    pair_s: Annotated[float, typer.Option(help="Most time for one pair, in one direction.")] = 10.0,
    start_s: Annotated[float, typer.Option(help="Most time until a host has said what it is.")] = 60.0,
    strict: Annotated[bool, typer.Option("--strict", help="Warnings count as failures.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say what is broken or slow, and the way out. Of this machine, or of all hosts of a Ray cluster."""
    from baton.common.resolve import merge
    from baton.deploy import standing
    from baton.deploy.doctor import command as examination
    from baton.deploy.doctor.examination import Bounds
    from baton.deploy.doctor.findings import Severity

    layers = layers_of(config, settings, flags_of(model, prefill, decode, host, port, None))
    if ray_address is not None and standing.is_jobs_api(ray_address):
        options = [f"--pair-s={pair_s}", f"--start-s={start_s}"]
        options += [f"--url={url}"] if url else []
        options += [name for name, on in (("--all-pairs", all_pairs), ("--strict", strict), ("--json", as_json)) if on]
        options += [] if measure else ["--no-measure"]
        words = ["doctor", "--ray-address=auto", *options]
        standing.submit(ray_address, standing.command_for_head(words, layers), typer.echo)
        return
    merged, _ = merge(layers)
    bounds = Bounds(start_s=start_s, pair_s=pair_s, all_pairs=all_pairs, measure=measure)
    verdict = examination.examine(merged, url, ray_address, bounds, None if as_json else Console(highlight=False))
    if verdict is Severity.FAIL or (strict and verdict is Severity.WARN):
        raise typer.Exit(FAILED)


def scale(
    counts: Annotated[list[str], typer.Argument(metavar="ROLE=N...", help="prefill=3 decode=2, say.")],
    cluster: Cluster = "baton",
    ray_address: RunningRay = "auto",
    within_s: Within = 600.0,
) -> None:
    """More workers, or fewer. Those that leave finish what they have."""
    from baton.deploy import changing
    from baton.deploy.launch import attach
    from baton.deploy.ray_join import free_cpus, tell_room

    wanted: dict[str, int] = {}
    for count in counts:
        role, equals, number = count.partition("=")
        if not equals or not number.isdecimal():
            raise typer.BadParameter(f"{count!r} is not like decode=2")
        wanted[role] = int(number)
    handle = attach(cluster, ray_address)
    before, free = handle.current_plan(), free_cpus()
    tell_room(free, changing.added(before, changing.scale(handle, wanted)), _note)
    changing.watch(handle, within_s, _note)


def upgrade(
    config: ConfigFile = None,
    settings: Settings = None,
    model: Model = None,
    dtype: Dtype = None,
    surge: Annotated[int, typer.Option(min=0, help="Decode workers beside the others meanwhile.")] = 1,
    cluster: Cluster = "baton",
    ray_address: RunningRay = "auto",
    within_s: Within = 3600.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say which settings would change.")] = False,
) -> None:
    """Replace all processes, one after the other. The new ones have these settings (all of them: what is not
    given is the default), and are of the release that is installed now."""
    from baton.deploy import changing
    from baton.deploy.launch import attach
    from baton.deploy.ray_join import free_cpus, tell_room
    from baton.deploy.serve import decide

    handle = attach(cluster, ray_address)
    before, free = handle.current_plan(), free_cpus()
    running = before.config
    same = {"cluster": cluster, "gateways": running.gateways, "prefill": running.prefill, "decode": running.decode}
    where = {"gateway": {"host": running.gateway.host, "port": running.gateway.port}}
    layers = layers_of(config, settings, flags_of(model or running.model.model, None, None, None, None, dtype))
    wanted = decide([Layer("the running cluster", {**same, **where}), *layers], err)
    later = changing.plan_upgrade(handle, wanted, surge=surge)
    changes = changing.changed_settings(before, later)
    _note("\n".join(["settings that change:", *(f"  {line}" for line in changes)]) if changes else "no setting changes")
    if dry_run:
        return
    handle.change(later)
    tell_room(free, changing.added(before, later), _note)
    given_up = changing.watch(handle, within_s, _note, later.revision)
    if given_up:
        err.print(f"given up: {given_up}", markup=False)
        raise typer.Exit(FAILED)
    handle.restart_controller()


def drain(worker: Worker, cluster: Cluster = "baton", ray_address: RunningRay = "auto") -> None:
    """Replace a worker when it has finished what it runs. It takes nothing new."""
    _replace_worker(worker, None, cluster, ray_address)


def flip(
    worker: Worker,
    role: Annotated[str, typer.Argument(help="prefill or decode.")],
    cluster: Cluster = "baton",
    ray_address: RunningRay = "auto",
) -> None:
    """Give a worker another role when it has finished what it runs. Its name stays."""
    _replace_worker(worker, role, cluster, ray_address)


def _note(line: str) -> None:
    err.print(line, markup=False)


def _replace_worker(worker: str, role: str | None, cluster: str, ray_address: str) -> None:
    from baton.common.ids import WorkerId
    from baton.deploy.launch import attach

    attach(cluster, ray_address).replace_worker(WorkerId(worker), role)
    wanted = f" as a {role} worker" if role else ""
    err.print(f"{worker} takes nothing new; when it has finished what it has, it begins anew{wanted}", markup=False)
