"""What a person is told when the Ray cluster they named cannot be joined."""

from __future__ import annotations

import pytest
import ray

from baton.deploy.launch import LaunchError, attach


@pytest.mark.parametrize("error", [ConnectionError, RuntimeError, ValueError])
def test_a_ray_that_cannot_be_joined_is_named(monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    def refuse(**_: object) -> None:
        raise error("nobody answers\nand many more lines")

    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(LaunchError, match=r"at 10\.0\.0\.1:6379: nobody answers$"):
        attach("baton", "10.0.0.1:6379")
