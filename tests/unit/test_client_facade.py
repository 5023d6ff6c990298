"""The client for plain code has the verbs of that on asyncio, with the same parameters."""

from __future__ import annotations

import inspect

import pytest

from baton.client import AsyncClient, AsyncJob, AsyncStream, Client, Job, Stream

RENAMED = {"aclose": "close"}


def verbs(kind: type) -> dict[str, list[tuple[str, object, str]]]:
    """Public ones, with their parameters' names, defaults and types."""
    return {
        RENAMED.get(name, name): [
            (one.name, one.default, str(one.annotation)) for one in inspect.signature(member).parameters.values()
        ]
        for name, member in vars(kind).items()
        if inspect.isfunction(member) and not name.startswith("_")
    }


@pytest.mark.parametrize(("plain", "on_asyncio"), [(Client, AsyncClient), (Job, AsyncJob), (Stream, AsyncStream)])
def test_both_have_the_same_verbs(plain: type, on_asyncio: type) -> None:
    assert verbs(plain) == verbs(on_asyncio)
    assert inspect.signature(Client) == inspect.signature(AsyncClient)
