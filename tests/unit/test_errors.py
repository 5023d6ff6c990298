"""Errors for people, on their way between processes."""

from __future__ import annotations

import pickle  # noqa: TID251 - Ray pickles what an actor raises

import pytest

from baton.common.errors import BatonError, ConfigError, ErrorCode, RequestError


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("gateway.port", 80, "cannot listen there", "0 takes any free port"),
        RequestError(ErrorCode.OVERLOADED, "too much", "prompt", 1.5),
    ],
)
def test_an_error_says_the_same_in_another_process(error: BatonError) -> None:
    arrived = pickle.loads(pickle.dumps(error))
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    assert vars(arrived) == vars(error)
