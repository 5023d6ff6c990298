"""Two child processes that make up a leg, and what the benchmark asks of them.

Owns: the processes, their pipes, and their being stopped while it is not their turn (a peer's progress thread may spin
for ever). Never: a measurement that outlives a command.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baton.common.ids import CONTROLLER, Epoch, Stamp, WorkerId
from baton.common.messages import Hello, Member, Membership
from baton.transfer.keys import KeyPair
from baton.transfer.mesh import Mesh
from benchmarks.children import ANSWER_S, ROOT, ChildProcess, EndFailed

PEERS = ROOT / ".venv-bench"
"""The environment of the peers, made by `make bench-transfer`. Libraries of Debian packages lie in its `debs`."""


class Child(ChildProcess):
    """One end of a leg."""

    def __init__(self, module: str, spec: Mapping[str, Any], *, peers: bool = False) -> None:
        libraries = ":".join(map(str, PEERS.glob("debs/**/x86_64-linux-gnu"))) if peers else ""
        environment = ({"LD_LIBRARY_PATH": libraries} if libraries else {}) | spec.get("environment", {})
        python = str(PEERS / "bin/python") if peers else sys.executable
        name = f"{module} ({spec.get('side', '')})"
        super().__init__(python, f"benchmarks.transfer.{module}", spec, environment, name=name)


@dataclass(frozen=True)
class Move:
    """What one turn took."""

    took_s: float
    cpu_s: float  # of both processes


class Pair:
    """A source and a target. `initiator`: who is told to move; the other one serves."""

    def __init__(self, source: Child, target: Child, initiator: str, *, stop_between_turns: bool) -> None:
        self.source, self.target = source, target
        self._active, self._passive = (target, source) if initiator == "target" else (source, target)
        self._stops = stop_between_turns

    def move(self, pages: int, concurrent: int, first: int) -> Move:
        self._passive.ask("begin", pages=pages, concurrent=concurrent)
        moved = self._active.ask("move", pages=pages, concurrent=concurrent, first=first)
        served = self._passive.ask("end")
        done_s = served.get("done") or moved["done"]
        return Move(done_s - moved["started"], moved["cpu_s"] + served["cpu_s"])

    def check(self, pages: int, concurrent: int) -> str:
        """Moves once into cleared pages. Returns what is wrong, or ""."""
        self.target.ask("clear")
        self.move(pages, concurrent, first=0)
        found = self.target.ask("check", pages=pages, concurrent=concurrent, first=0)
        wrong, stray = found["wrong"], found["stray"]
        return f"{wrong} of {pages * concurrent} pages are wrong, {stray} others were written" if wrong or stray else ""

    def begin_turn(self) -> None:
        for child in (self.source, self.target):
            if self._stops:
                child.resume()

    def end_turn(self) -> None:
        for child in (self.source, self.target):
            if self._stops:
                child.stop()

    def close(self) -> None:
        self.source.close()
        self.target.close()


def join(source: Child, target: Child) -> None:
    """Each is told how the other can be reached."""
    hellos = [child.receive()["hello"] for child in (source, target)]
    source.send({"peer": hellos[1]})
    target.send({"peer": hellos[0]})
    for child in (source, target):
        child.receive()


def baton_ends(
    lane: str,
    page_bytes: int,
    pool_bytes: int,
    *,
    encrypted: bool = True,
    environment: Mapping[str, str] | None = None,
    sources: int = 1,
    targets: int = 1,
    dead_after_s: float = 30.0,
    profile: str = "",
) -> tuple[list[Child], list[Child]]:
    """I/O threads in processes of their own, each target a receiver from all sources, members of one cluster."""
    keys = KeyPair.generate() if encrypted else None
    mesh = Mesh(Stamp(CONTROLLER, 1, Epoch(1)), "127.0.0.1", keys)
    names = {
        "source": [f"prefill-{number}" for number in range(sources)],
        "target": [f"decode-{number}" for number in range(targets)],
    }
    other = {"source": "target", "target": "source"}
    shared = {
        "lane": lane,
        "hub": mesh.address,
        "page_bytes": page_bytes,
        "pool_bytes": pool_bytes,
        "dead_after_s": dead_after_s,
        "environment": dict(environment or {}),
        "members": sources + targets,
        "hub_key": "" if keys is None else keys.public,
    }
    ends: dict[str, list[Child]] = {
        side: [
            Child(
                "baton_end",
                shared
                | {"side": side, "worker": worker, "peers": names[other[side]], "guest": _invite(mesh, worker)}
                | {"profile": f"{profile}/{side}" if profile else ""},
            )
            for worker in names[side]
        ]
        for side in ("source", "target")
    }
    everybody = ends["source"] + ends["target"]
    try:
        _admit(mesh, everybody)
        for child in everybody:
            child.receive()
            child.send({"peer": None})
        for child in everybody:
            child.receive()
    except EndFailed:
        for child in everybody:
            child.close()
        raise
    finally:
        mesh.close()
    return ends["source"], ends["target"]


def _invite(mesh: Mesh, worker: str) -> dict[str, str] | None:
    """The key pair with which a child may say Hello."""
    if mesh.keys is None:
        return None
    guest = KeyPair.generate()
    mesh.allow.invite(guest.public, WorkerId(worker), 1)
    return {"public": guest.public, "secret": guest.secret}


def _admit(mesh: Mesh, children: list[Child]) -> None:
    """Answers Hello until all have heard of all; they stay members for good then. Raises EndFailed."""
    members: dict[WorkerId, Member] = {}
    deadline_s = time.monotonic() + ANSWER_S
    while not all(child.has_spoken for child in children):
        for frame in mesh.poll(0.05):
            if isinstance(frame.body, Hello):
                members[frame.src.worker] = frame.body.member
        for worker, member in members.items():
            mesh.connect(worker, member.address, member.key)
            mesh.send(worker, Epoch(0), Membership(version=len(members), members=tuple(members.values())))
        if time.monotonic() > deadline_s:
            raise EndFailed(f"{len(members)} of {len(children)} ends said Hello")
