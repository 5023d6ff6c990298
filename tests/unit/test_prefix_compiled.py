"""The compiled prefix tree as a guest in a Python process: where there is no compiler, where several processes want it
at once, what of its memory is left, and that the audit believes nothing it says."""

from __future__ import annotations

import gc
import os
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from prefix_rig import compiled, given, held, ints

from baton.common.kv.errors import InvariantViolation
from baton.common.kv.layout import Component, KvLayout
from baton.common.kv.prefix.compiled import LIBRARY, CompiledTree
from baton.common.kv.prefix.compiled_dump import Record
from baton.common.kv.prefix.interface import GroupPages, PrefixLease
from baton.common.kv.prefix.radix_cpp import RadixCacheCpp
from baton.common.native import BuildError, built

SCRIPT = textwrap.dedent("""
    from baton.common.kv.layout import KvLayout
    from baton.common.kv.prefix.configurations import make_prefix_cache
    from baton.common.config import LoggingConfig
    from baton.common.log import ProcessName, configure_logging
    configure_logging(ProcessName("test", "test"), LoggingConfig())
    made = [make_prefix_cache(name, KvLayout(4)) for name in ("radix", "RadixCacheCpp", "radix")]
    print(*{type(one).__name__ for one in made})
""")


def start(**environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SCRIPT]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=os.environ | environment, stdout=pipe, stderr=pipe, text=True)


def fake_compiler(path: Path, script: str) -> str:
    """One that ends with `script`, to which $2 is where the library is wanted."""
    path.write_text(f'#!/bin/sh\necho x >> {path}.log\nwhile [ "$1" != -o ]; do shift; done\n{script}\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_without_a_compiler_the_tree_in_python_serves_and_says_so_once(tmp_path: Path) -> None:
    said, log = start(CXX="no-such-compiler", BATON_CACHE_DIR=str(tmp_path)).communicate(timeout=60)
    assert said.split() == ["UnifiedRadixCache"]
    lines = log.splitlines()
    assert len(lines) == 1
    assert "prefix_tree_not_compiled" in lines[0]
    assert "no-such-compiler" in lines[0]


def test_what_cannot_be_loaded_is_said_too(tmp_path: Path) -> None:
    broken = fake_compiler(tmp_path / "c++", 'echo "no library" > "$2"')
    said, log = start(CXX=broken, BATON_CACHE_DIR=str(tmp_path / "cache")).communicate(timeout=60)
    assert said.split() == ["UnifiedRadixCache"]
    assert "cannot be loaded" in log


def test_of_several_processes_one_compiles(tmp_path: Path) -> None:
    try:
        library = built(LIBRARY)
    except BuildError as error:
        pytest.skip(str(error))
    slow = fake_compiler(tmp_path / "c++", f'cp {library} "$2"')
    workers = [start(CXX=slow, BATON_CACHE_DIR=str(tmp_path / "cache")) for _ in range(3)]
    assert [worker.communicate(timeout=60)[0] for worker in workers] == ["RadixCacheCpp\n"] * 3
    assert len(Path(f"{slow}.log").read_text().split()) == 1


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="asks Linux")
def test_a_tree_that_is_dropped_gives_its_memory_back() -> None:
    """At once, without a garbage collection. Of twenty trees of 8 MB, one after the other, none is left."""
    layout, pages = KvLayout(1), GroupPages(np.arange(1, 8193, dtype=np.int32))
    tokens = np.arange(8192, dtype=np.int32)

    def fill_and_drop() -> None:
        cache = compiled(layout)
        for n in range(120):
            tokens[0] = n
            cache.insert(None, tokens, pages)

    fill_and_drop()
    gc.disable()
    try:
        before = resident_bytes()
        for _ in range(20):
            fill_and_drop()
        assert resident_bytes() - before < 40e6
    finally:
        gc.enable()


# ------------------------------------------------------------------------------------------ the audit


def audited() -> tuple[RadixCacheCpp, PrefixLease]:
    """Nodes with and without children, locks, live windows and checkpoints."""
    cache = compiled(KvLayout(1, window=3, state=True))
    cache.unlock(held(cache.insert(None, ints(1, 2, 3), given([11, 12, 13], [21, 22, 23], 1)).lease))
    cache.unlock(held(cache.insert(None, ints(1, 2, 3, 4), given(range(31, 35), range(41, 45), 2)).lease))
    cache.unlock(held(cache.insert(None, ints(9, 8, 7), given([51, 52, 53], [61, 62, 63], 4)).lease))
    lease = held(cache.insert(None, ints(1, 2, 3, 5, 6), given(range(71, 76), range(81, 86), 3)).lease)
    cache.evict(Component.SWA, 2)
    return cache, lease


def test_the_audit_passes_what_is_right_and_counts_leases() -> None:
    cache, lease = audited()
    cache.check([lease])
    with pytest.raises(InvariantViolation):
        cache.check([])
    with pytest.raises(InvariantViolation):
        cache.check([lease, lease])


def test_the_audit_finds_each_number_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for a time of use that no queue depends on, and for which slot a checkpoint is in."""
    cache, lease = audited()
    table, fields = CompiledTree.table, Record._fields
    cache.check([lease])
    unnoticed: list[str] = []
    for place in range(5 + cache.stats().nodes * len(fields)):
        monkeypatch.setattr(CompiledTree, "table", lambda tree, place=place: plus_one(table(tree), place))
        try:
            cache.check([lease])
            unnoticed.append(fields[(place - 5) % len(fields)] if place >= 5 else f"number {place}")
        except InvariantViolation:
            pass
    assert set(unnoticed) <= {"last_use", "swa_use", "state_use", "state"}
    assert unnoticed.count("state") <= 1
    assert len(unnoticed) < 3 * cache.stats().nodes


def plus_one(numbers: npt.NDArray[np.int64], place: int) -> npt.NDArray[np.int64]:
    changed = numbers.copy()
    changed[place] += 1
    return changed
