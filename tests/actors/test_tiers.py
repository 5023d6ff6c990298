"""Tiers below the pools of a real cluster: what a small pool forgets comes back from below, whoever dies, and damage on
the disk is a miss and nothing else."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import ray
from harness import Outcome, Question, ask, ask_all, check, kill, kill_config, question, wait_clean

from baton.common.config import ClusterConfig, DecodeConfig, KvConfig, ModelConfig, TiersConfig
from baton.common.ids import WorkerId
from baton.deploy.client import Client
from baton.deploy.launch import ClusterHandle, launch
from baton.transfer.reports import WorkerStatus

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

PAGES = 72  # of 16 tokens: three of the prompts below, which are asked for in turn
DECODE = WorkerId("decode-0")


def config(name: str, tiers: TiersConfig) -> ClusterConfig:
    return replace(
        kill_config(name),
        prefill=1,
        decode=1,
        model=ModelConfig(model="fake", max_model_len=700),
        kv=KvConfig(num_pages=PAGES, tiers=tiers),
        decode_worker=DecodeConfig(num_reserved_decode_tokens=16, max_running_requests=16),
    )


@contextmanager
def running(made: ClusterConfig) -> Iterator[ClusterHandle]:
    handle = launch(made)
    try:
        yield handle
    finally:
        handle.shutdown()


def questions() -> list[Question]:
    rng = random.Random(11)
    return [question(rng, prompt_tokens=330 + index, max_tokens=4) for index in range(8)]


def restored(client: Client, asked: list[Question]) -> int:
    """One after the other; how many prompt tokens came from the tiers."""
    found = 0
    for one in asked:
        answer = client.complete(
            list(one.prompt), max_tokens=one.max_tokens, temperature=one.temperature, seed=one.seed, ignore_eos=True
        )
        assert answer.text == one.expected
        timeline = answer.timeline
        kept = timeline.cached_tokens + timeline.restored_tokens
        assert kept + timeline.local_tokens + timeline.transferred_tokens == len(one.prompt)
        found += timeline.restored_tokens
    return found


def status_of(cluster: ClusterHandle) -> WorkerStatus:
    actor = cluster.actor(DECODE)
    assert actor is not None
    status: WorkerStatus = ray.get(actor.status.remote(), timeout=60.0)
    return status


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiers")


@pytest.fixture(scope="module")
def through(ray_session: str, place: Path) -> Iterator[ClusterHandle]:
    with running(config("tiers-through", tiers_at(place, "through"))) as cluster:
        yield cluster


def tiers_at(place: Path, write: Literal["through", "back"]) -> TiersConfig:
    (place / "shared").mkdir(exist_ok=True)
    return TiersConfig(
        host_bytes=1 << 20, disk_path=str(place / "disk"), external=f"file://{place}/shared", write=write
    )


def test_what_a_small_pool_forgets_comes_back(through: ClusterHandle) -> None:
    ask_for_more_than_fits(through)


@pytest.mark.slow
def test_what_is_written_back_comes_back(ray_session: str, tmp_path: Path) -> None:
    with running(config("tiers-back", tiers_at(tmp_path, "back"))) as cluster:
        ask_for_more_than_fits(cluster)


def ask_for_more_than_fits(cluster: ClusterHandle) -> None:
    with Client(cluster.gateway_url, timeout_s=60) as client:
        asked = questions()
        first = restored(client, asked)
        second = restored(client, asked)
        assert second > first
        assert second > 330 * 4, "most prompts, all but their ends"
        counters = status_of(cluster).counters
        assert counters["tiers.restored_pages"] * 16 >= second
        # Many at a time: pages are retracted, stored, restored and evicted at once.
        rng = random.Random(12)
        check(ask_all(client, [*asked, *(question(rng, max_tokens=60) for _ in range(40)), *asked]))
        wait_clean(cluster)


def test_a_successor_finds_what_was_stored_and_no_damage_is_served(through: ClusterHandle, place: Path) -> None:
    """The directory of a worker is its successor's. Half of the files were damaged meanwhile, there and in the shared
    directory, and the host's memory went with its process."""
    with Client(through.gateway_url, timeout_s=120) as client:
        asked = questions()
        restored(client, asked)
        wait_clean(through)
        before = status_of(through).incarnation
        assert kill(through, DECODE)
        for directory in (place / "disk" / DECODE, place / "shared"):
            files = sorted(directory.rglob("*.kv"))
            assert len(files) > 50, directory
            for path in files[::2]:
                damaged = bytearray(path.read_bytes())
                damaged[len(damaged) // 2] ^= 0x40
                path.write_bytes(damaged)
        outcomes: list[Outcome] = [ask(client, one) for one in asked]
        check(outcomes)
        status = status_of(through)
        assert status.incarnation > before
        assert status.counters["tiers.disk.damaged"] > 0
        assert status.counters["tiers.restored_pages"] > 0
        wait_clean(through)
        assert status_of(through).incarnation == status.incarnation, "nobody died of it"
