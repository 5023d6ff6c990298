"""What a worker prepares before it is on the network: its copies, and the tiers below its pool."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.common import env
from baton.common.compat import KV_VERSION
from baton.common.config import ClusterConfig, KvConfig, ModelConfig, TiersConfig
from baton.common.engine.batch import ModelRunner
from baton.common.engine.core_api import EngineCore
from baton.common.engine.fake_runner import fake_runner
from baton.common.errors import ConfigError
from baton.common.ids import WorkerId
from baton.common.kv.layout import KvLayout
from baton.common.kv.tiers.keys import PageKey
from baton.common.native import built
from baton.transfer.copying import LIBRARY
from baton.transfer.keys import ControllerDoor, KeyPair
from baton.transfer.process import ProcessSpec
from baton.transfer.worker import WorkerProcess

KEYS = KeyPair.generate()
LAYOUTS = [KvLayout(16, window=64), KvLayout(16, state=True), KvLayout(16, full=False, window=64)]


def spec_with(tiers: TiersConfig, run_dir: Path) -> ProcessSpec:
    return ProcessSpec(
        worker=WorkerId("decode-0"),
        role="decode",
        incarnation=1,
        controller=ControllerDoor("tcp://127.0.0.1:1"),
        config=ClusterConfig(model=ModelConfig(model="fake"), kv=KvConfig(tiers=tiers)),
        cores=(),
        run_dir=str(run_dir),
    )


def no_core(*_: object) -> EngineCore:
    pytest.fail("nothing is served")


def load(layout: KvLayout, tiers: TiersConfig, run_dir: Path) -> None:
    """A worker with this model and these tiers, until it would begin to serve."""

    def runner(spec: ProcessSpec, say: Callable[[str], None]) -> ModelRunner:
        return fake_runner(dict.fromkeys(layout.components, 33), 16, layout=layout)

    WorkerProcess(spec_with(tiers, run_dir), KEYS, no_core, 8, 64, 0.0, runner, has_tiers=True).load(lambda step: None)


class _LoadedSoFarError(Exception):
    pass


@pytest.mark.skipif(shutil.which(env.compiler()) is None, reason="no C++ compiler")
def test_copies_are_compiled_before_anybody_counts_heartbeats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def runner(spec: ProcessSpec, say: Callable[[str], None]) -> ModelRunner:
        raise _LoadedSoFarError

    compiler = tmp_path / "quick"  # has compiled it before
    compiler.write_text(f'#!/bin/sh\nfor target; do :; done\ncp "{built(LIBRARY)}" "$target"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path))
    said: list[str] = []
    worker = WorkerProcess(spec_with(TiersConfig(), tmp_path), KEYS, no_core, 8, 64, 0.0, runner, has_tiers=False)
    with pytest.raises(_LoadedSoFarError):
        worker.load(said.append)
    assert said == ["compiling the page copies (once; about two seconds)"]
    said.clear()
    with pytest.raises(_LoadedSoFarError):
        worker.load(said.append)
    assert said == []


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "+".join(layout.components))
def test_a_model_that_cannot_use_tiers_is_refused(layout: KvLayout, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kv\.tiers.*sliding or recurrent"):
        load(layout, TiersConfig(host_bytes=1 << 20), tmp_path)


@pytest.mark.parametrize("level", ["host", "disk", "external"])
def test_a_level_that_holds_no_page_is_refused(level: str, tmp_path: Path) -> None:
    tiers = {
        "host": TiersConfig(host_bytes=100),
        "disk": TiersConfig(host_bytes=1 << 20, disk_path=str(tmp_path), disk_bytes=100),
        "external": TiersConfig(external=f"file://{tmp_path}", external_bytes=100),
    }
    with pytest.raises(ConfigError, match=rf"kv\.tiers\.{level}_bytes = 100: holds no page"):
        load(KvLayout(16), tiers[level], tmp_path)


def test_a_new_version_of_kv_finds_no_page_of_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Disks and shared directories outlive a release."""
    roots: list[PageKey] = []

    def named(config: TiersConfig, worker: WorkerId, root: PageKey, page_bytes: int) -> None:
        roots.append(root)
        raise _LoadedSoFarError

    monkeypatch.setattr("baton.transfer.worker.open_tiers", named)
    for version in (KV_VERSION, KV_VERSION, KV_VERSION + 1):
        monkeypatch.setattr("baton.transfer.worker.KV_VERSION", version)
        with pytest.raises(_LoadedSoFarError):
            load(KvLayout(16), TiersConfig(host_bytes=1 << 20), tmp_path)
    assert roots[0] == roots[1] != roots[2]
