"""Memory that a peer maps: only for reading, never shorter than promised, and provably the right one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from baton.common import huge_pages
from baton.common.shared_memory import NotShared, SharedBlock, SharedView

CHILD = """
import sys, numpy as np
from baton.common.shared_memory import SharedBlock
block = SharedBlock(10000)
block.memory[:] = 7
print(block.fd, block.nonce.hex(), flush=True)
sys.stdin.read()
"""


def view_of(block: SharedBlock, nbytes: int | None = None) -> SharedView:
    return SharedView(os.getpid(), block.fd, block.nonce, len(block.memory) if nbytes is None else nbytes)


def test_a_view_shows_what_the_owner_writes_and_cannot_write() -> None:
    block = SharedBlock(10000)
    assert not block.memory.any()
    view = view_of(block)
    block.memory[:] = np.arange(10000) % 251
    assert np.array_equal(view.memory, block.memory)
    with pytest.raises(ValueError, match="read-only"):
        view.memory[0] = 1


def test_a_view_outlives_the_process_that_it_shows() -> None:
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    fd, nonce = child.stdout.readline().split()
    view = SharedView(child.pid, int(fd), bytes.fromhex(nonce), 10000)
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert (view.memory == 7).all()
    assert view.valid
    with pytest.raises(NotShared, match="cannot be opened: No such file"):
        SharedView(child.pid, int(fd), bytes.fromhex(nonce), 10000)


def test_the_owner_can_take_it_back() -> None:
    block = SharedBlock(100)
    view = view_of(block)
    assert view.valid
    block.revoke()
    assert not view.valid
    with pytest.raises(NotShared, match="another process"):
        view_of(block)


def test_what_could_shrink_under_the_reader_is_not_mapped(tmp_path: os.PathLike[str]) -> None:
    block = SharedBlock(100)
    with pytest.raises(PermissionError):
        os.ftruncate(block.fd, 10)
    plain = os.open(os.path.join(tmp_path, "file"), os.O_CREAT | os.O_RDWR)
    unsealed = os.memfd_create("open", os.MFD_ALLOW_SEALING)
    for fd in (plain, unsealed):
        os.ftruncate(fd, 8192)
        with pytest.raises(NotShared, match="no sealed memory"):
            SharedView(os.getpid(), fd, block.nonce, 4096)
        os.close(fd)


@pytest.mark.parametrize("nbytes", [99, 101, 0])
def test_another_size_than_announced_is_refused(nbytes: int) -> None:
    block = SharedBlock(100)
    with pytest.raises(NotShared, match="bytes where"):
        view_of(block, nbytes)


def test_something_that_never_opens_does_not_hold_the_reader_up() -> None:
    reading, writing = os.pipe()
    with pytest.raises(NotShared, match="no sealed memory"):
        SharedView(os.getpid(), reading, b"\0" * 16, 100)
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize(
    ("choice", "huge"),
    [
        ("always within_size advise [never] deny force", False),
        ("always within_size [advise] never deny force", True),
        ("[always] within_size advise never deny force", True),
        ("always within_size advise never [deny] force", False),
        (None, False),
    ],
)
def test_whether_shared_memory_has_huge_pages_is_the_kernels_word(
    choice: str | None, huge: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "shmem_enabled"
    if choice is not None:
        file.write_text(choice)
    monkeypatch.setattr(huge_pages, "OF_SHARED_MEMORY", file)
    assert huge_pages.shared_huge_pages() is huge


def test_a_block_that_nobody_needs_gives_its_descriptor_back() -> None:
    block = SharedBlock(100)
    fd, memory = block.fd, block.memory
    del block
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    memory[:] = 1  # still there for whoever holds it
