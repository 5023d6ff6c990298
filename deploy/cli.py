"""The command `baton`: all its commands, and what their ends are told as. Never: does work of its own.

Exit codes: 0 done, 1 it failed, 2 it was asked wrongly (usage or configuration). What is expected to go wrong is told
in one or two lines on stderr; a traceback is a bug of ours. Answers go to stdout, everything about them to stderr.
SIGTERM ends a command cleanly, with 143 where it was not done; a second one at once.
"""

from __future__ import annotations

import signal
import sys
from importlib.metadata import version as installed_version
from types import FrameType

import typer

from baton.common.errors import BatonError, ConfigError, ErrorCode, RequestError
from baton.deploy.commands import keys, looking, serving, studying
from baton.deploy.commands.options import FAILED, MISUSED, OK, TERMINATED, err
from baton.deploy.jobs import command as jobs

__all__ = ["FAILED", "MISUSED", "OK", "TERMINATED", "app", "main", "run_command"]

app = typer.Typer(
    name="baton",
    help="Serves large language models with prefill and decode on separate workers.",
    add_completion=True,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def version() -> None:
    """Print the version."""
    typer.echo(f"baton {installed_version('baton-pd')}")


for command in (
    serving.serve, serving.deploy, serving.down, serving.run, serving.chat, jobs.submit, studying.bench, looking.status,
    looking.top, looking.kv, looking.handoffs, looking.trace, serving.doctor, serving.drain, serving.flip,
    serving.scale, serving.upgrade,
    serving.leave, studying.calibrate, studying.plan, studying.sim, serving.demo, version,
):  # fmt: skip
    app.command()(command)
app.add_typer(jobs.app)
app.add_typer(keys.app)


class _Terminated(BaseException):
    """Told to stop, by SIGTERM."""


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    raise _Terminated


def main() -> None:
    """The console script."""
    signal.signal(signal.SIGTERM, _on_sigterm)
    sys.exit(run_command(sys.argv[1:]))


def run_command(arguments: list[str]) -> int:
    """Runs one command and returns its exit code."""
    try:
        app(arguments, prog_name="baton")
    except SystemExit as end:  # how the command line library ends, well or with a usage error (2)
        return end.code if isinstance(end.code, int) else OK
    except _Terminated:
        err.print("baton: told to stop", markup=False)
        return TERMINATED
    except ConfigError as error:
        err.print(f"baton: {error}", markup=False)
        return MISUSED
    except BatonError as error:
        err.print(f"baton: {error}", markup=False)
        if isinstance(error, RequestError) and error.code is ErrorCode.UNAUTHENTICATED:
            err.print("commands send the key that is in BATON_API_KEY; `baton keys new` makes one", markup=False)
        if isinstance(error, RequestError) and error.code is ErrorCode.ADMIN_ONLY:
            err.print("the key in BATON_API_KEY is a client's; ask with an operator's", markup=False)
        return FAILED
    return OK


if __name__ == "__main__":
    main()
