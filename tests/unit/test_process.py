"""Pid records, and the proof that a process is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.common.config import ClusterConfig
from baton.common.errors import ConfigError
from baton.deploy import launch
from baton.transfer.process import (
    actor_name,
    parse_actor_name,
    reap,
    reap_all_except,
    recorded_pid,
    register_process,
)

CHILD = """
import sys
from baton.transfer.process import register_process
register_process(sys.argv[1], sys.argv[2])
print("registered", flush=True)
sys.stdin.read()
"""


def start(run_dir: Path, name: str) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(run_dir), name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "registered\n"
    return child


@pytest.fixture
def child(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    with start(tmp_path, "decode-0@1") as made:
        yield made
        made.kill()


def test_a_process_is_found_killed_and_proven_gone(tmp_path: Path, child: subprocess.Popen[str]) -> None:
    assert recorded_pid(str(tmp_path), "decode-0@1") == child.pid
    assert reap(str(tmp_path), "decode-0@1", grace_s=0.0, timeout_s=10.0)
    assert child.wait(0) == -signal.SIGKILL
    assert recorded_pid(str(tmp_path), "decode-0@1") is None


@pytest.mark.timeout(30)  # it cannot obey: nobody waits for it to
def test_a_stopped_process_is_killed_at_once(tmp_path: Path, child: subprocess.Popen[str]) -> None:
    os.kill(child.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
    assert reap(str(tmp_path), "decode-0@1", grace_s=60.0, timeout_s=10.0)
    assert child.wait(0) == -signal.SIGKILL


def test_a_process_that_goes_by_itself_is_not_killed(tmp_path: Path, child: subprocess.Popen[str]) -> None:
    assert child.stdin is not None
    child.stdin.close()
    assert reap(str(tmp_path), "decode-0@1", grace_s=10.0, timeout_s=10.0)
    assert child.wait(0) == 0


def test_who_never_was_here_is_gone(tmp_path: Path) -> None:
    assert reap(str(tmp_path), "decode-7@3", grace_s=0.0, timeout_s=0.0)


def test_a_recycled_pid_is_left_alone(tmp_path: Path, child: subprocess.Popen[str]) -> None:
    (tmp_path / "decode-0@1").write_text(f"{child.pid} 1")
    assert reap(str(tmp_path), "decode-0@1", grace_s=0.0, timeout_s=10.0)
    assert child.poll() is None


def test_strangers_are_reaped_and_the_known_kept(tmp_path: Path, child: subprocess.Popen[str]) -> None:
    with start(tmp_path, "prefill-0@4") as stranger:
        assert reap_all_except(str(tmp_path), frozenset({"decode-0@1"}), timeout_s=10.0)
        assert stranger.wait(0) == -signal.SIGKILL
    assert child.poll() is None


def test_registering_again_replaces_the_record(tmp_path: Path) -> None:
    register_process(str(tmp_path), "me@1")
    register_process(str(tmp_path), "me@1")
    assert recorded_pid(str(tmp_path), "me@1") == os.getpid()
    assert [path.name for path in tmp_path.iterdir()] == ["me@1"]


def test_names_carry_the_incarnation() -> None:
    assert parse_actor_name(actor_name("decode-1", 12)) == ("decode-1", 12)  # type: ignore[arg-type]
    for foreign in ("controller", "decode-1", "@3", "decode-1@x", "decode-1@"):
        assert parse_actor_name(foreign) is None


def test_the_run_directory_and_its_parent_are_private(tmp_path: Path) -> None:
    old_mask = os.umask(0)
    try:
        register_process(str(tmp_path / "baton" / "run"), "me@1")
    finally:
        os.umask(old_mask)
    for made in (tmp_path / "baton", tmp_path / "baton" / "run"):
        assert made.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o701, 0o720, 0o755, 0o777])
@pytest.mark.parametrize("open_one", ["baton", "baton/run"])
def test_a_directory_that_others_can_enter_is_refused(tmp_path: Path, open_one: str, mode: int) -> None:
    (tmp_path / "baton" / "run").mkdir(parents=True)
    for made in ("baton", "baton/run"):
        (tmp_path / made).chmod(mode if made == open_one else 0o700)
    with pytest.raises(ConfigError, match=f"chmod 700 {tmp_path / open_one}"):
        register_process(str(tmp_path / "baton" / "run"), "me@1")
    assert list((tmp_path / "baton" / "run").iterdir()) == []


def test_what_another_user_put_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "baton").mkdir(mode=0o700)
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    with pytest.raises(ConfigError, match="is not a directory of this user"):
        register_process(str(tmp_path / "baton" / "run"), "me@1")


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "baton").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="is not a directory of this user"):
        register_process(str(tmp_path / "baton" / "run"), "me@1")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_launch_starts_nothing_above_an_open_run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o755)
    monkeypatch.setattr(launch, "run_root", lambda: str(tmp_path))
    monkeypatch.setattr(launch, "connect_ray", lambda *_: pytest.fail("connected to Ray"))
    with pytest.raises(ConfigError, match="is open to other users"):
        launch.launch(ClusterConfig())


LOADING = """
import gc, os, sys, threading
from baton.common.config import ClusterConfig
from baton.common.ids import Epoch, Stamp, WorkerId
from baton.transfer.actor import ProcessActor
from baton.transfer.io import IoThread
from baton.transfer.keys import ControllerDoor
from baton.transfer.process import ProcessSpec

class Loads:
    def load(self, say):
        self.model = [[number] for number in range(100_000)]
        return IoThread(Stamp(WorkerId("gateway-0"), 1, Epoch(1)), "gateway", ClusterConfig(), None, None, delivered)

    def serve(self):
        pass

def delivered(event):
    pass

class Actor(ProcessActor):
    def make_process(self, spec, keys):
        return Loads()

    def _say(self, step):
        if step == "registering":
            print(gc.get_freeze_count() > 100_000, flush=True)
            os._exit(0)

Actor(
    ProcessSpec(
        worker=WorkerId("gateway-0"),
        role="gateway",
        incarnation=1,
        controller=ControllerDoor("tcp://127.0.0.1:9"),
        config=ClusterConfig(),
        cores=(),
        run_dir=sys.argv[1],
    )
)
threading.Event().wait()
"""


def test_what_was_loaded_is_no_business_of_the_garbage_collector(tmp_path: Path) -> None:
    """A full collection over all that a model brings stops every thread for a tenth of a second."""
    child = subprocess.run([sys.executable, "-c", LOADING, str(tmp_path)], capture_output=True, text=True, timeout=50)
    assert child.stdout.splitlines()[-1:] == ["True"], child.stderr
