"""What the calls of the prefix tree cost, in Python and compiled, measured in turns, medians.

    python benchmarks/bench_prefix.py [--rounds 9] [--write docs/benchmarks/prefix.md]

Of a key with so many pages, whose known part is one node or 16 (a conversation of 16 turns), in trees of three sizes:
`match` looks it up; `finish` offers all of it when all is known, and unlocks; `new` does when nothing is known.
Eviction takes the 200 oldest pages. What a tree of 100,000 nodes occupies is measured in a process of its own.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from baton.common.kv.layout import Component, KvLayout
from baton.common.kv.prefix.compiled import load_library
from baton.common.kv.prefix.interface import I32, GroupPages, PrefixCache
from baton.common.kv.prefix.radix_cpp import RadixCacheCpp
from baton.common.kv.prefix.tree import UnifiedRadixCache

PAGE_SIZES = (1, 16)
TREE_NODES = (100, 10_000, 100_000)
KEY_PAGES = (16, 128, 1024, 8192)
PATH_NODES = (1, 16)
EVICTED_PAGES = 200
MEMORY_PAGE_SIZE, MEMORY_NODES = 16, 100_000
FAMILY = 10  # nodes: a prompt of 8 pages and its 9 continuations of 4
CONTENDERS = ("python", "compiled")
OPERATIONS = ("match", "finish", "new")
Row = dict[str, float]


def make(contender: str, page_size: int) -> PrefixCache:
    layout = KvLayout(page_size)
    return UnifiedRadixCache(layout) if contender == "python" else RadixCacheCpp(load_library(), layout)


class Filled:
    """A tree with a background of families, and one key that is known in all its pages."""

    def __init__(self, contender: str, page_size: int, nodes: int) -> None:
        self.cache = make(contender, page_size)
        self.page_size = page_size
        self.next_page = 1
        self.next_token = 1_000_000
        for family in range(nodes // FAMILY):
            for child in range(FAMILY - 1):
                self.add(self.background(family, child))

    def background(self, family: int, child: int) -> I32:
        first = np.full(8 * self.page_size, 2 * family, dtype=np.int32)
        return np.concatenate((first, np.full(4 * self.page_size, 10_000 + child, dtype=np.int32)))

    def add(self, tokens: I32) -> None:
        count = len(tokens) // self.page_size
        pages = np.arange(self.next_page, self.next_page + count, dtype=np.int32)
        self.next_page = (self.next_page + count) % (1 << 30)
        lease = self.cache.insert(None, tokens, GroupPages(pages)).lease
        assert lease is not None
        self.cache.unlock(lease)

    def fresh(self, pages: int) -> I32:
        self.next_token += 1
        tokens = np.arange(pages * self.page_size, dtype=np.int32)
        tokens[: self.page_size] = self.next_token
        return tokens

    def known(self, pages: int, path_nodes: int) -> I32:
        tokens = self.fresh(pages)
        for turn in range(1, path_nodes + 1):
            self.add(tokens[: turn * pages // path_nodes * self.page_size])
        return tokens


def timed(action: Callable[[], object], times: int) -> float:
    """Microseconds of processor time per call: a busy machine disturbs it less than the clock."""
    start = time.thread_time()
    for _ in range(times):
        action()
    return 1e6 * (time.thread_time() - start) / times


def measure_key(trees: dict[str, Filled], pages: int, path_nodes: int, rounds: int) -> Row:
    """Medians by "operation contender"."""
    found: dict[str, list[float]] = {f"{what} {who}": [] for what in OPERATIONS for who in CONTENDERS}
    keys = {who: tree.known(pages, path_nodes) for who, tree in trees.items()}
    for _ in range(rounds + 1):
        for who, tree in trees.items():
            key = keys[who]
            found[f"match {who}"].append(timed(lambda tree=tree, key=key: tree.cache.match_prefix(key), 50))
            found[f"finish {who}"].append(timed(lambda tree=tree, key=key: tree.add(key), 20))
            unknown = [tree.fresh(pages) for _ in range(5)]
            found[f"new {who}"].append(timed(lambda tree=tree, unknown=unknown: tree.add(unknown.pop()), 5))
    return {name: statistics.median(times[1:]) for name, times in found.items()}


def measure_eviction(trees: dict[str, Filled], nodes: int, rounds: int) -> Row:
    """Medians of microseconds per node that goes. What is evicted is put back, as the youngest."""
    found: dict[str, list[float]] = {who: [] for who in CONTENDERS}
    leaves = nodes // FAMILY * (FAMILY - 1)
    for number in range(rounds + 1):
        for who, tree in trees.items():
            before = tree.cache.stats().nodes
            passed = timed(lambda tree=tree: tree.cache.evict(Component.FULL, EVICTED_PAGES), 1)
            found[who].append(passed / (before - tree.cache.stats().nodes))
            first = number * EVICTED_PAGES // 4
            for leaf in range(first, first + EVICTED_PAGES // 4):
                tree.add(tree.background(*divmod(leaf % leaves, FAMILY - 1)))
    return {who: statistics.median(times[1:]) for who, times in found.items()}


class _Allocator(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [(f"field{number}", ctypes.c_size_t) for number in range(10)]


def allocated_mb() -> float:
    """What is allocated by C and C++ and not freed, without what Python's own allocator has for small objects."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _Allocator
    info = mallinfo()
    return (info.field4 + info.field7) / 1e6  # hblkhd, uordblks


def resident_mb() -> float:
    """After what is free was given back to the system, as far as it can be."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6


def measure_memory(contender: str) -> Row:
    """In this process, which must be a fresh one."""
    Filled(contender, MEMORY_PAGE_SIZE, 100)
    gc.collect()
    gc.disable()
    before, allocated = resident_mb(), allocated_mb()
    tree = Filled(contender, MEMORY_PAGE_SIZE, MEMORY_NODES)
    row = {"resident for the tree, MB": resident_mb() - before}
    row["a garbage collection beside it, ms"] = statistics.median(timed(gc.collect, 1) / 1000 for _ in range(5))
    start = time.perf_counter()
    del tree
    row["dropping it, ms"] = 1000 * (time.perf_counter() - start)
    row["allocated still when it was dropped, MB"] = allocated_mb() - allocated
    row["resident still when it was dropped, MB"] = resident_mb() - before
    gc.collect()
    row["resident still after a garbage collection, MB"] = resident_mb() - before
    return row


def memory_in_process(contender: str) -> Row:
    command = [sys.executable, __file__, "--memory", contender]
    row: Row = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return row


def cell(row: Row, name: str) -> str:
    python, compiled = row[f"{name}python"], row[f"{name}compiled"]
    return f"{python:.1f} / {compiled:.1f} ({python / compiled:.1f}x)"


def measure_all(rounds: int) -> tuple[dict[tuple[int, int, int, int], Row], dict[tuple[int, int], Row]]:
    """Of keys, by page size, nodes of the tree, pages of the key and nodes on its path; and of evictions."""
    keys: dict[tuple[int, int, int, int], Row] = {}
    evictions: dict[tuple[int, int], Row] = {}
    for page_size in PAGE_SIZES:
        for nodes in TREE_NODES:
            trees = {who: Filled(who, page_size, nodes) for who in CONTENDERS}
            evictions[page_size, nodes] = measure_eviction(trees, nodes, rounds)
            for pages in KEY_PAGES:
                for path_nodes in PATH_NODES:
                    keys[page_size, nodes, pages, path_nodes] = measure_key(trees, pages, path_nodes, rounds)
            print(f"page size {page_size}, {nodes} nodes: done", flush=True)
    return keys, evictions


def summary(keys: dict[tuple[int, int, int, int], Row]) -> list[str]:
    """How many times as fast the compiled tree is: the median over the page sizes and the sizes of the tree."""
    lines = []
    for what in OPERATIONS:
        for path_nodes in PATH_NODES if what != "new" else PATH_NODES[:1]:
            ratios = [
                statistics.median(
                    row[f"{what} python"] / row[f"{what} compiled"]
                    for (_, _, its_pages, its_path), row in keys.items()
                    if its_pages == pages and its_path == path_nodes
                )
                for pages in KEY_PAGES
            ]
            cells = " | ".join(f"{ratio:.1f}x" for ratio in ratios)
            lines.append(f"| {what} | {path_nodes if what != 'new' else 'none'} | {cells} |")
    return lines


def slower(keys: dict[tuple[int, int, int, int], Row]) -> str:
    """Where the compiled tree takes 5 % longer, or more, in the median over the sizes of the tree."""
    found = []
    for what in OPERATIONS:
        for page_size, pages, path in itertools.product(PAGE_SIZES, KEY_PAGES, PATH_NODES):
            rows = [keys[page_size, nodes, pages, path] for nodes in TREE_NODES]
            ratio = statistics.median(row[f"{what} python"] / row[f"{what} compiled"] for row in rows)
            if ratio < 0.95:
                found.append(f"- {what}, page size {page_size}, {pages:,} pages, {path} on the path: {ratio:.2f}x")
    return "\n".join(found) or "- nowhere"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--memory", choices=CONTENDERS, help="measure one tree's memory, print JSON and end")
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    if options.memory:
        print(json.dumps(measure_memory(options.memory)))
        return
    keys, evictions = measure_all(options.rounds)
    text = report(keys, evictions, {who: memory_in_process(who) for who in CONTENDERS}, options.rounds)
    print(text)
    if options.write:
        options.write.parent.mkdir(parents=True, exist_ok=True)
        options.write.write_text(text)


def report(
    keys: dict[tuple[int, int, int, int], Row],
    evictions: dict[tuple[int, int], Row],
    memory: dict[str, Row],
    rounds: int,
) -> str:
    processor = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.machine(),
    )
    detail = [
        f"| {page_size} | {nodes:,} | {pages:,} | {path} | "
        + " | ".join(cell(row, f"{what} ") for what in OPERATIONS)
        + " |"
        for (page_size, nodes, pages, path), row in keys.items()
    ]
    evicted = [f"| {page_size} | {nodes:,} | {cell(row, '')} |" for (page_size, nodes), row in evictions.items()]
    occupied = [
        f"| {name} | {memory['python'][name]:.0f} | {memory['compiled'][name]:.0f} |" for name in memory["python"]
    ]
    return f"""# The prefix tree, in Python and compiled

Layout of full attention, one tree of each kind in one process, measured in turns, medians of {rounds} rounds after a
warm-up, in processor time. Ratios count, absolute numbers depend on the machine.

- Machine: {processor}, {os.cpu_count()} cores, {platform.system()} {platform.release()}, Python
  {platform.python_version()}; load average {os.getloadavg()[0]:.1f} at the end.
- Remake: `python benchmarks/bench_prefix.py --rounds {rounds} --write docs/benchmarks/prefix.md`

## From which size the compiled tree is faster

How many times as fast it is, by the pages of the key and the nodes that its known part consists of (a conversation of
16 turns has 16); `match` looks a key up, `finish` offers it when all of it is known and unlocks it, `new` does when
nothing is known. Medians over both page sizes and all sizes of the tree, which makes no difference. Where the path is
one node, most of a call are the values of the interface, which both make in Python.

| call | nodes on the path | {" | ".join(f"{pages:,} pages" for pages in KEY_PAGES)} |
|---|---|{"---|" * len(KEY_PAGES)}
{chr(10).join(summary(keys))}

It is slower, by 5 % or more:
{slower(keys)}

## Evicting

Microseconds per node that goes, Python / compiled: a heap, so the logarithm of the tree's size at most.

| page size | nodes of the tree | us per node |
|---|---|---|
{chr(10).join(evicted)}

## A tree of {MEMORY_NODES:,} nodes in memory

Page size {MEMORY_PAGE_SIZE}. Python's nodes know their parents, so a tree that is dropped waits for a garbage
collection, and each full collection of the process walks all of them; the compiled tree is freed when the cache is
dropped.

| | Python | compiled |
|---|---|---|
{chr(10).join(occupied)}

## Each size

Microseconds, Python / compiled.

| page size | nodes of the tree | pages of the key | nodes on the path | match | finish | new |
|---|---|---|---|---|---|---|
{chr(10).join(detail)}
"""


if __name__ == "__main__":
    main()
