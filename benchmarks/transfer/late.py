"""Late writes and late reads: one end is stopped (SIGSTOP) in mid-transfer, the deadline passes, the other end gives
the pages to somebody else, the stopped end wakes up and goes on. Whose bytes are in the pages then?

A live system cannot tell such a peer from a dead one. Owns: the scripts of both experiments, for Baton's lanes and for
NIXL, and their counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from benchmarks.transfer.children import EndFailed, Pair
from benchmarks.transfer.legs import BatonLeg, NixlLeg

TTL_S = 2.0
"""The deadline of the hand-off, at least. The stop comes long before it."""
SETTLE_S = 1.0
"""How long the woken process is watched, after it has said that it is done."""
TRIES = 5


@dataclass(frozen=True)
class Scale:
    page_bytes: int
    pages: int

    @property
    def pool_bytes(self) -> int:
        return self.page_bytes * self.pages


SCALE = Scale(4 << 10, 32768)


@dataclass(frozen=True)
class Late:
    """One experiment. `bad`: pages that hold, or were read with, bytes of somebody else while their owner was told that
    they are his; None: it could not be run, see `story`."""

    leg: str
    stopped: str
    is_peer: bool
    pages: int
    bad: int | None
    story: str


class Missed(Exception):
    """The transfer was over before the stop."""


def measure(baton: list[BatonLeg], *, nixl: bool, scale: Scale = SCALE) -> list[Late]:
    results = []
    for leg in baton:
        results.append(_try(leg.name, "source", False, scale, partial(_baton_source_stopped, leg, scale)))
        results.append(_try(leg.name, "target", False, scale, partial(_baton_target_stopped, leg, scale)))
    if nixl:
        write = NixlLeg("NIXL write", "host", operation="WRITE", progress_thread=False)
        read = NixlLeg("NIXL read", "host", progress_thread=False)
        for landed, when in ((1, "at its first page"), (scale.pages // 4, "after a quarter")):
            run = partial(_nixl_source_stopped, write, scale, landed)
            results.append(_try(f"{write.name}, stopped {when}", "source", True, scale, run))
        results.append(_try(read.name, "target", True, scale, partial(_nixl_target_stopped, read, scale)))
    return results


def _try(leg: str, stopped: str, is_peer: bool, scale: Scale, run: Callable[[], tuple[int, str]]) -> Late:
    """A few times, when the transfer was over before the stop."""
    story = ""
    for _ in range(TRIES):
        try:
            bad, story = run()
        except Missed as missed:
            story = str(missed)
        except EndFailed as failure:
            return Late(leg, stopped, is_peer, scale.pages, None, str(failure))
        else:
            return Late(leg, stopped, is_peer, scale.pages, bad, story)
    return Late(leg, stopped, is_peer, scale.pages, None, f"{story}, {TRIES} times")


def _baton_source_stopped(leg: BatonLeg, scale: Scale) -> tuple[int, str]:
    """Foreign pages at the target, after it was told that the hand-off is over and has reused them."""
    pair = leg.start(scale.page_bytes, scale.pool_bytes)
    source, target = pair.source, pair.target
    try:
        ttl_s = _prepare(pair, scale)
        target.ask("open", pages=scale.pages, ttl_s=ttl_s)
        stopped = target.ask("stop_when", pid=source.pid, landed=scale.pages // 4)
        outcome = target.ask("outcome")
        if stopped["over"] or outcome["how"] == "committed":
            raise Missed("the hand-off had ended before its source could be stopped")
        target.ask("reuse")
        source.resume()
        woken = source.ask("source_log", wait_s=10.0)
        target.ask("ping")  # it lives, and hears
        time.sleep(SETTLE_S)
        foreign = target.ask("foreign")["foreign"]
    finally:
        pair.close()
    story = (
        f"about {stopped['landed']} pages had landed; the target was told: {outcome['how']}, and reused all pages; the"
        f" source woke up and was told: {', '.join(woken['log'])}"
    )
    return foreign, story


def _baton_target_stopped(leg: BatonLeg, scale: Scale) -> tuple[int, str]:
    """Pages that the target takes for valid and that are not, after the source has reused its own as soon as it was
    told that nobody reads them."""
    pair = leg.start(scale.page_bytes, scale.pool_bytes)
    source, target = pair.source, pair.target
    try:
        ttl_s = _prepare(pair, scale)
        source.ask("reuse_when_over", pages=scale.pages)
        target.ask("open", pages=scale.pages, ttl_s=ttl_s)
        target.send({"op": "stop_when", "pid": target.pid, "landed": scale.pages // 4})
        target.wait_stopped()
        asleep = source.ask("source_log", wait_s=ttl_s + 1.5)
        target.resume()
        stopped, outcome = target.receive(), target.ask("outcome")
        if stopped["over"] or asleep["log"] == ["SourceReleased"]:
            raise Missed("the hand-off had ended before its target could be stopped")
        awake = source.ask("source_log", wait_s=10.0)
    finally:
        pair.close()
    kept = "reused its pages" if asleep["over"] else "kept its pages, which may still be read"
    story = (
        f"about {stopped['landed']} pages had landed; when the deadline passed the source was told:"
        f" {', '.join(asleep['log'])}, and {kept}; the target woke up and was told: {outcome['how']},"
        f" {outcome['valid']} pages valid; then the source: {', '.join(awake['log'])}"
    )
    return outcome["wrong"], story


def _prepare(pair: Pair, scale: Scale) -> float:
    """One hand-off that nobody disturbs. Returns the deadline to give the next one."""
    took_s = pair.move(scale.pages, 1, first=0).took_s
    pair.source.ask("source_log", wait_s=10.0)
    pair.source.ask("forget_log")
    pair.target.ask("clear")
    return max(TTL_S, 4 * took_s)


def _nixl_source_stopped(leg: NixlLeg, scale: Scale, landed: int) -> tuple[int, str]:
    """The same as for Baton; the target also withdraws its memory from NIXL before it reuses it."""
    pair = leg.start(scale.page_bytes, scale.pool_bytes)
    source, target = pair.source, pair.target
    pair.begin_turn()
    try:
        _warm_up(pair)
        target.ask("clear")
        target.ask("post", pages=scale.pages)
        source.ask("post", pages=scale.pages)
        landed = target.ask("stop_when", pid=source.pid, landed=landed)["landed"]
        if source.has_spoken:
            raise Missed("the transfer had ended before its source could be stopped")
        time.sleep(TTL_S)
        target.ask("reuse", deregister=True)
        target.ask("serve")
        source.resume()
        try:
            source.receive()
            woken = "the source woke up and was told: DONE"
        except EndFailed as failure:
            woken = f"the source woke up and failed: {failure}"
        time.sleep(SETTLE_S)
        target.ask("end")
        foreign = target.ask("foreign")["foreign"]
    finally:
        pair.close()
    story = (
        f"about {landed} pages had landed; the target gave up after {TTL_S:.0f} s, deregistered and reused all pages;"
        f" {woken}"
    )
    return foreign, story


def _nixl_target_stopped(leg: NixlLeg, scale: Scale) -> tuple[int, str]:
    """Pages that the reader was told are read (DONE), and that hold what the source's next user wrote."""
    pair = leg.start(scale.page_bytes, scale.pool_bytes)
    source, target = pair.source, pair.target
    pair.begin_turn()
    try:
        took_s = _warm_up(pair, scale.pages)
        target.ask("clear")
        source.ask("post", pages=scale.pages)
        target.ask("post", pages=scale.pages)
        time.sleep(took_s / 3)
        target.stop()
        target.wait_stopped()
        if target.has_spoken:
            raise Missed("the transfer had ended before its target could be stopped")
        time.sleep(TTL_S)
        source.ask("reuse", deregister=True)
        source.ask("serve")
        target.resume()
        target.receive()
        source.ask("end")
        wrong = target.ask("check", pages=scale.pages, concurrent=1, first=0)["wrong"]
    finally:
        pair.close()
    story = (
        f"the source gave up after {TTL_S:.0f} s, deregistered and reused all pages; the target woke up and was told:"
        " DONE"
    )
    return wrong, story


def _warm_up(pair: Pair, pages: int = 64) -> float:
    """Connections are made by the first transfer. Returns what the last one took."""
    pair.move(pages, 1, first=0)
    return pair.move(pages, 1, first=0).took_s


def table(results: list[Late]) -> list[str]:
    lines = ["| | stopped | foreign pages | what happened |", "|---|---|---|---|"]
    for late in results:
        foreign = "–" if late.bad is None else f"**{late.bad:,}** of {late.pages:,}"
        lines.append(f"| {late.leg} | {late.stopped} | {foreign} | {late.story} |")
    return [*lines, ""]


def document(results: list[Late], machine: str) -> list[str]:
    return [
        "# Late writes",
        "",
        f"A hand-off of {SCALE.pages:,} scattered pages is stopped in the middle (SIGSTOP of one process), its deadline"
        " passes, the other side reuses its pages as soon as it is told that it may, and the stopped process wakes up"
        " (SIGCONT). Until it wakes up, such a process cannot be told from a dead one.",
        "",
        "- Source stopped: pages of the target that hold anything but what their new owner wrote.",
        "- Target stopped: pages that the target was told are valid, and that hold what the new owner of the source's"
        " pages wrote.",
        f"- Machine: {machine}. Remake: `make bench-late-write`; exit status 1 when a lane of Baton has one such page.",
        "",
        *table(results),
        "Why: a peer's bytes reach pages only through code of the process that owns the pages, and only while the"
        " hand-off is registered there (docs/TRANSFER-PROTOCOL.md). A lane whose target reads the source's memory has"
        " the mirror risk, so there the source keeps its pages until the target has said that it stopped, or is"
        " proven dead. A one-sided write has no such owner: whoever holds the key writes, whenever it wakes up, and"
        " withdrawing the memory does not stop what was posted before.",
        "",
    ]


def violations(results: list[Late]) -> list[Late]:
    """Of Baton's: with a foreign page, or not run."""
    return [late for late in results if not late.is_peer and late.bad != 0]
