"""Which cores processes are given: workers one each, gateways what is left."""

from __future__ import annotations

import os

import pytest

from baton.deploy.launch import cores_for, cores_left


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 3, 5, 7})


@pytest.mark.parametrize(
    ("workers", "left"),
    [(1, (3, 5, 7)), (3, (7,)), (4, ()), (6, ())],
)
def test_gateways_have_the_cores_that_no_worker_has(workers: int, left: tuple[int, ...]) -> None:
    assert cores_left(cores_for(workers)) == left
