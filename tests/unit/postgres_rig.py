"""A PostgreSQL server for the tests, as one on a machine of its own would be: made, started, and taken away again."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

PLACES = "/usr/lib/postgresql/*/bin"  # Debian's, off PATH
START_S = 60


def find_server() -> Path | None:
    """The directory of its programs."""
    on_path = shutil.which("initdb")
    found = [Path(on_path).resolve().parent] if on_path else []
    found += sorted(Path("/").glob(f"{PLACES.removeprefix('/')}"), reverse=True)
    return next((place for place in found if (place / "postgres").exists()), None)


@contextlib.contextmanager
def running_server(programs: Path) -> Iterator[str]:
    """The URL of its database; through a socket in a directory, so that there is no port to be taken."""
    with tempfile.TemporaryDirectory(prefix="pg", dir="/tmp") as folder:  # short: a socket's name is
        user = _not_root(folder)
        data = f"{folder}/data"
        _run(programs, user, "initdb", "-D", data, "-U", "baton", "--auth=trust", "--no-sync", "--no-locale", "-EUTF8")
        options = f"-k {folder} -c listen_addresses='' -c fsync=off"
        _run(
            programs,
            user,
            "pg_ctl",
            "-D",
            data,
            "-w",
            "-t",
            str(START_S),
            "-l",
            f"{folder}/log",
            "-o",
            options,
            "start",
        )
        try:
            yield f"postgresql://baton@/postgres?host={folder}"
        finally:
            _run(programs, user, "pg_ctl", "-D", data, "-w", "-m", "immediate", "stop")


def _not_root(folder: str) -> int | None:
    """The server refuses to be root's: then it is nobody's."""
    if os.getuid():
        return None
    nobody = pwd.getpwnam("nobody")
    os.chown(folder, nobody.pw_uid, nobody.pw_gid)
    return nobody.pw_uid


def _run(programs: Path, user: int | None, *command: str) -> None:
    arguments = [str(programs / command[0]), *command[1:]]
    done = subprocess.run(
        arguments, user=user, cwd="/tmp", capture_output=True, text=True, timeout=START_S, check=False
    )
    assert done.returncode == 0, f"{command[0]}: {done.stdout}{done.stderr}"
