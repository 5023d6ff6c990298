"""What several commands of `baton` share: options, exit codes, and how settings come together. Never: a command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from baton.common.resolve import Layer, assignments_layer, environment_layer, file_layer, nested

OK, FAILED, MISUSED, TERMINATED = 0, 1, 2, 143

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
RayOrJobs = Annotated[
    str,
    typer.Option(
        "--address", "--ray-address", help="The Ray to run on, as one of its nodes; or its Jobs API: http://HEAD:8265."
    ),
]
Cluster = Annotated[str, typer.Option(help="Its name, of the setting `cluster`.")]
DrainS = Annotated[float, typer.Option(help="What runs may take so long to finish.")]
Worker = Annotated[str, typer.Argument(help="decode-0, say.")]
Url = Annotated[str | None, typer.Option(help="The gateway. Default: $BATON_URL, else http://127.0.0.1:8000.")]
Doctor = Annotated[
    bool, typer.Option("--doctor", help="Examine the hosts first, and bring nothing up where anything fails.")
]
AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]


def own_cluster(local: bool, config: Path | None, settings: list[str] | None, model: str | None) -> list[Layer] | None:
    """The settings of one that is brought up for a command; None: one that runs is asked."""
    if local:
        return layers_of(config, settings, flags_of(model, None, None, None, 0, None))
    if config is not None or settings or model is not None:
        raise typer.BadParameter("--model, --config and --set need --local: a running cluster has its own")
    return None


def flags_of(
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


def layers_of(config: Path | None, settings: list[str] | None, flags: dict[str, Any]) -> list[Layer]:
    """Later ones win: file, environment, --set, options."""
    layers = [file_layer(config)] if config is not None else []
    return [*layers, environment_layer(), assignments_layer(settings or []), Layer("command line", nested(flags))]
