"""`baton keys`: API keys of the gateway's clients. Never: keeps one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from baton.common.config import MAX_PRIORITY
from baton.common.errors import ConfigError
from baton.deploy.commands.options import err

app = typer.Typer(name="keys", help="API keys of the gateway's clients.", no_args_is_help=True)


@app.callback()
def keys() -> None:
    """API keys of the gateway's clients."""


@app.command()
def new(
    name: Annotated[str, typer.Option(help="Whose it is: in metrics, and of sessions, files and batches.")],
    file: Annotated[Path | None, typer.Option(help="Append the entry to this file (gateway.api_keys_file).")] = None,
    weight: Annotated[float, typer.Option(help="Its share of the cluster, beside others that wait, too.")] = 1.0,
    requests_per_minute: Annotated[float | None, typer.Option(help="Most, at each gateway.")] = None,
    tokens_per_minute: Annotated[float | None, typer.Option(help="Most, of prompts and answers.")] = None,
    top_priority: Annotated[int, typer.Option(help="The most urgent it may be; smaller is sooner.")] = -MAX_PRIORITY,
    admin: Annotated[bool, typer.Option("--admin", help="An operator's: it may see what everybody does.")] = False,
) -> None:
    """Make a key. It is printed once; the file has its hash alone. A gateway that runs sees a change in a second."""
    from baton.deploy.api_keys import ApiKey, entry_line, new_key

    wanted = {
        "name": name, "sha256": "0" * 64, "weight": weight, "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute, "top_priority": top_priority, "admin": admin,
    }  # fmt: skip
    try:
        key, entry = new_key(msgspec.convert(wanted, ApiKey))
    except msgspec.ValidationError as error:
        raise typer.BadParameter(str(error)) from error
    line = entry_line(entry)
    if file is None:
        err.print("The key, which nobody can show again:", markup=False)
        typer.echo(key)
        err.print("A line for the file of gateway.api_keys_file:", markup=False)
        err.print(line, end="", markup=False)
        return
    try:
        _append(file, line)
    except OSError as error:
        raise typer.BadParameter(f"cannot write {file}: {error.strerror}") from error
    typer.echo(key)


def _append(file: Path, line: str) -> None:
    """Only where the gateway can read the file afterwards. Raises ConfigError, or OSError."""
    from baton.deploy.api_keys import parse_keys

    before = file.read_bytes() if file.exists() else b""
    if before and not before.endswith(b"\n"):
        line = f"\n{line}"
    try:
        parse_keys(before.decode() + line, file)
    except (ConfigError, UnicodeDecodeError) as error:
        reason = "an entry on a line of its own cannot be added to it; without --file it is printed"
        raise ConfigError("--file", str(file), reason) from error
    with file.open("a") as entries:
        entries.write(line)
