"""Hand-offs under everything at once: frames lost and repeated, bytes delayed and damaged, connections cut, processes
stopped and killed, from one seed. `make chaos` runs ten thousand, the ordinary run a few hundred.

What must hold: what was committed is byte for byte what its source had; every failure has a code and came in time; no
page is written after it was given back; and when quiet returns, all pages, slots and sessions are back and hand-offs
work.
"""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field

from chaos_mesh import FrameFaults
from chaos_peer import Account, Pace
from chaos_proxy import ByteFaults
from chaos_rig import ChaosCluster, chaos_config

from baton.common.errors import ErrorCode
from baton.transfer.transports.ucx import why_unavailable

SOURCES = ("prefill-0", "prefill-1")
ALL_LANES = ("local", "ucx", "tcp", "zmq")
SINK_LANES = {
    "decode-local": ("local", "tcp", "zmq"),
    "decode-tcp": ("tcp", "zmq"),
    "decode-zmq": ("zmq", "tcp"),
    "decode-ucx": ("ucx", "zmq"),
}
OPEN_PER_SINK = 8
FRAMES = FrameFaults(drop=0.01, duplicate=0.02, delay=0.02, truncate=0.005)
BYTES = ByteFaults(delay=0.02, stall=0.001, cut=0.0005, truncate=0.0005, flip=0.0005, double=0.0002)
GIVE_UP = 0.04
PIECE_DELAY_S = 0.02
EXPECTED = {
    ErrorCode.NO_WORKER,
    ErrorCode.DEADLINE_EXCEEDED,
    ErrorCode.CANCELLED,
    ErrorCode.TRANSFER_CORRUPT,
    ErrorCode.OUT_OF_PAGES,
    ErrorCode.DRAINING,
    ErrorCode.INTERNAL,  # a lane that broke
}


@dataclass(slots=True)
class Summary:
    committed: int = 0
    did: Counter[str] = field(default_factory=Counter)
    accounts: dict[str, Account] = field(default_factory=dict)
    took_s: float = 0.0


class Soak:
    def __init__(self, seed: int, committed: int, disturb_every_s: float, lanes_of: dict[str, tuple[str, ...]]) -> None:
        self._random = random.Random(seed)
        self._target = committed
        self._disturb_every_s = disturb_every_s
        self.summary = Summary()
        self.cluster = ChaosCluster(seed)
        without_ucx = bool(why_unavailable())
        for worker, lanes in {**dict.fromkeys(SOURCES, ALL_LANES), **lanes_of}.items():
            config = chaos_config(*(lane for lane in lanes if lane != "ucx" or not without_ucx))
            self.cluster.start(worker, config, FRAMES, None, PIECE_DELAY_S, GIVE_UP)
        self._sinks = tuple(lanes_of)

    def run(self, limit_s: float) -> Summary:
        cluster, began_s = self.cluster, time.monotonic()
        proxy = cluster.proxy
        assert proxy is not None
        try:
            cluster.wait_up()
            proxy.set_faults("", BYTES)
            for sink in self._sinks:
                cluster.peers[sink].send(Pace(OPEN_PER_SINK))
            self._disturb(began_s + limit_s)
            self._recover()
            proxy.set_faults("", ByteFaults())
            cluster.calm()
            self._still_works()
            for sink in self._sinks:
                cluster.peers[sink].send(Pace(0))
            self.summary.accounts = cluster.accounts()
            cluster.listen()
            for name, count in proxy.counts().items():
                self.summary.did[f"bytes {name}"] += count
            for account in self.summary.accounts.values():
                for name, count in account.frames.items():
                    self.summary.did[f"frames {name}"] += count
        finally:
            cluster.close()
        self.summary.committed = cluster.tally.committed.total()
        self.summary.took_s = time.monotonic() - began_s
        return self.summary

    # ---------------------------------------------------------------------------------------- disturbances

    def _disturb(self, until_s: float) -> None:
        tally = self.cluster.tally
        next_s = time.monotonic() + self._disturb_every_s
        self._due: list[tuple[float, str]] = []  # when a stopped one goes on, or a dead one gets a successor
        while tally.committed.total() < self._target:
            now = time.monotonic()
            assert now < until_s, f"too slow: {tally}"
            self.cluster.listen()
            self._end_due(now)
            if now >= next_s:
                next_s = now + self._random.expovariate(1 / self._disturb_every_s)
                self._strike(now)
            time.sleep(0.01)

    def _strike(self, now: float) -> None:
        """At most half of either side at a time."""
        down = {worker for _, worker in self._due}
        up = [worker for worker in self.cluster.peers if worker not in down]
        victim = self._random.choice(up)
        side = SOURCES if victim in SOURCES else self._sinks
        blow = self._random.choice(("kill", "stop", "stop", "cut"))
        assert self.cluster.proxy is not None
        if blow == "cut":
            self.cluster.proxy.cut(victim)
        elif 2 * (1 + len(down & set(side))) <= max(2, len(side)):
            peer = self.cluster.peers[victim]
            if blow == "kill":
                if self._random.random() < 0.3:
                    peer.signal(signal.SIGSTOP)  # killed in its sleep
                peer.kill()
                self._due.append((now + self._random.uniform(0.0, 1.0), victim))
            else:
                peer.signal(signal.SIGSTOP)
                self._due.append((now + self._random.choice((0.1, 0.5, 1.5, 2.5)), victim))
        else:
            return
        self.summary.did[blow] += 1

    def _end_due(self, now: float) -> None:
        for due_s, worker in list(self._due):
            if due_s <= now:
                self._due.remove((due_s, worker))
                self._help_up(worker)

    def _help_up(self, worker: str) -> None:
        peer = self.cluster.peers[worker]
        if not peer.is_dead:
            peer.signal(signal.SIGCONT)
            return
        successor = self.cluster.replace_dead(worker)
        if worker in self._sinks:
            successor.send(Pace(OPEN_PER_SINK))

    def _recover(self) -> None:
        for _, worker in self._due:
            self._help_up(worker)
        self._due.clear()
        self.cluster.wait_up()

    def _still_works(self) -> None:
        """Every sink commits again, by the lane that it likes best or another."""
        tally = self.cluster.tally
        before = tally.committed.total()
        self.cluster.wait(
            lambda: tally.committed.total() >= before + 4 * OPEN_PER_SINK * len(self._sinks), "hand-offs work again"
        )


def soak(seed: int, committed: int, limit_s: float, disturb_every_s: float, sinks: tuple[str, ...] = ()) -> Summary:
    """Runs and judges."""
    lanes_of = {sink: lanes for sink, lanes in SINK_LANES.items() if not sinks or sink in sinks}
    run = Soak(seed, committed, disturb_every_s, lanes_of)
    summary = run.run(limit_s)
    tally, accounts = run.cluster.tally, summary.accounts
    leaked = {worker: account for worker, account in accounts.items() if not account.clean}
    touched = sum(account.written_after_return for account in accounts.values())
    print(
        f"\nchaos: seed {seed}, {summary.took_s:.0f} s: committed {summary.committed} {dict(tally.committed)}, "
        f"{tally.nbytes >> 20} MiB; failed {dict(tally.failed)}; sources {dict(tally.given_back)}; "
        f"did {dict(sorted(summary.did.items()))}; wrong bytes {tally.wrong_bytes}, late {len(tally.late)}, "
        f"written after return {touched}, leaked pages {sum(account.lent_pages for account in leaked.values())}; "
        f"reasons {dict(tally.odd.most_common(12))}"
    )
    assert tally.wrong_bytes == 0
    assert touched == 0, "pages were written after they had been given back"
    assert not leaked, leaked
    assert not tally.late, tally.late
    assert not tally.untyped, tally.untyped
    assert set(tally.failed) <= EXPECTED, tally.failed
    return summary
