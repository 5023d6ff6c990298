"""What every process of a cluster is told when it is born, and how it can be proven dead later.

Owns: `ProcessSpec`, the pid record of a process, and the proof that a process is gone. Never: Ray, sockets, KV.

Why a record in a file: a stopped process answers nobody, so whoever must kill it cannot ask it for its pid, and Ray
calls an actor dead when it has *asked* it to die. The record holds pid and start time, so that a recycled pid is not
mistaken for the process. Records live on the node they speak of (`run_dir` is a node-local path).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import select
import signal
import stat
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from baton.common.by_name import ByName
from baton.common.config import ClusterConfig
from baton.common.errors import ConfigError
from baton.common.ids import Epoch, Stamp, WorkerId
from baton.common.log import ProcessName
from baton.transfer.keys import ControllerDoor

_PR_SET_PDEATHSIG = 1
_STAT_STATE, _STAT_START_TIME = 0, 19  # fields 3 and 22 of /proc/pid/stat, counted after the name's parenthesis


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec(ByName):
    """One incarnation of one seat. `controller` is where it says Hello; that may change later (`rejoin`)."""

    worker: WorkerId
    role: str
    incarnation: int
    controller: ControllerDoor
    config: ClusterConfig
    cores: tuple[int, ...]  # what the process pins itself to; empty: not pinned
    run_dir: str
    revision: int = 1  # of the settings

    @property
    def name(self) -> str:
        """Of the Ray actor and of the pid record."""
        return actor_name(self.worker, self.incarnation)

    @property
    def process_name(self) -> ProcessName:
        """In logs and traces."""
        return ProcessName(self.worker, self.role, self.incarnation)

    def new_stamp(self) -> Stamp:
        """Called once per process: the epoch is random."""
        return Stamp(self.worker, self.incarnation, Epoch(secrets.randbits(62) + 1))


def actor_name(worker: WorkerId, incarnation: int) -> str:
    return f"{worker}@{incarnation}"


def parse_actor_name(name: str) -> tuple[WorkerId, int] | None:
    """None for names that are not ours."""
    worker, at, incarnation = name.rpartition("@")
    return (WorkerId(worker), int(incarnation)) if at and worker and incarnation.isdecimal() else None


def new_run_dir(cluster: str) -> str:
    """Node-local, private to this user and to one launch: two clusters of one name must not reap each other."""
    return f"{run_root()}/{cluster}-{secrets.token_hex(4)}"


def run_root() -> str:
    """Above the run directories of all clusters of this user."""
    return f"/tmp/baton-{os.getuid()}"


def make_private(directory: Path) -> None:
    """Creates it, or sees that it is ours alone: who can write a pid record there chooses what we kill. Raises
    ConfigError."""
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise ConfigError("run directory", str(directory), "is not a directory of this user", "remove it")
    if found.st_mode & 0o077:
        raise ConfigError("run directory", str(directory), "is open to other users", f"chmod 700 {directory}")


def register_process(run_dir: str, name: str) -> None:
    """The first thing a process does, before it opens any socket or touches any memory of others. Raises
    ConfigError when the run directory is not private."""
    directory = Path(run_dir)
    make_private(directory.parent)
    make_private(directory)
    pid = os.getpid()
    record = directory / f".{name}.{pid}"
    record.write_text(f"{pid} {_start_time(pid)}")
    record.replace(directory / name)


def die_with_parent() -> None:
    """Asks the kernel for SIGKILL when the parent (Ray's node process) dies, so that nothing outlives a cluster."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def on_sigterm(do: Callable[[], None]) -> None:
    """Calls `do` once, on a thread of its own, when this process is told to stop. To be called on the main thread. That
    one is Ray's and seldom in Python; the byte that the kernel's signal leaves in a pipe is there at once."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def wait() -> None:
        while os.read(reader, 1) != bytes([signal.SIGTERM]):
            pass
        do()

    signal.signal(signal.SIGTERM, lambda number, frame: None)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=wait, name="sigterm", daemon=True).start()


def recorded_pid(run_dir: str, name: str) -> int | None:
    """The process of that name on this node, or None: it is gone, or never was here."""
    try:
        pid_text, start_text = (Path(run_dir) / name).read_text().split()
    except FileNotFoundError:
        return None
    pid = int(pid_text)
    return pid if _start_time(pid) == int(start_text) else None


def reap(run_dir: str, name: str, grace_s: float, timeout_s: float) -> bool:
    """Waits `grace_s` for the recorded process to go by itself (one that is stopped cannot), then kills it with SIGKILL
    and waits until it is gone. True is proof for this node: no process of that name lives here and none can come back.
    False: the kernel had not finished it in time (ask again)."""
    pid = recorded_pid(run_dir, name)
    if pid is not None:
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            handle = -1
        if handle >= 0 and not _end_and_wait(handle, pid, run_dir, name, grace_s, timeout_s):
            return False
    with contextlib.suppress(FileNotFoundError):
        (Path(run_dir) / name).unlink()
    return True


def _end_and_wait(handle: int, pid: int, run_dir: str, name: str, grace_s: float, timeout_s: float) -> bool:
    """A pidfd cannot come to mean another process, and becomes readable at the moment of its death."""
    try:
        if recorded_pid(run_dir, name) != pid:  # recycled before the handle was opened
            return True
        poller = select.poll()
        poller.register(handle, select.POLLIN)
        if not _is_stopped(pid) and poller.poll(round(grace_s * 1000)):
            return True
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        return bool(poller.poll(round(timeout_s * 1000)))
    finally:
        os.close(handle)


def _start_time(pid: int) -> int | None:
    """Clock ticks after boot; None when there is no such process. A zombie still has one: `reap` asks its pidfd."""
    stat = _stat(pid)
    return None if stat is None else int(stat[_STAT_START_TIME])


def _is_stopped(pid: int) -> bool:
    """By a signal: it does nothing until it is told to go on, or killed."""
    stat = _stat(pid)
    return stat is not None and stat[_STAT_STATE] == "T"


def _stat(pid: int) -> list[str] | None:
    """What the kernel says of a process, after its name; None when there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def pin_process(cores: Iterable[int]) -> None:
    """Pins every thread of this process to these cores, and so those they start later; no-op for none."""
    cores = tuple(cores)
    if not cores:
        return
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # a thread that ended meanwhile
            os.sched_setaffinity(int(thread), cores)


def reap_all_except(run_dir: str, keep: frozenset[str], timeout_s: float) -> bool:
    """`reap` for every record on this node that is not in `keep`. True: all of them are proven gone."""
    directory = Path(run_dir)
    names = [path.name for path in directory.iterdir()] if directory.is_dir() else []
    others = [name for name in names if not name.startswith(".") and name not in keep]
    gone = [reap(run_dir, name, 0.0, timeout_s) for name in others]  # all are tried, whatever becomes of the first
    return all(gone)
