"""The client for plain code has the verbs of that on asyncio, with the same parameters."""

from __future__ import annotations

import inspect

import pytest

from baton.client import AsyncClient, AsyncJob, AsyncStream, Client, Job, Stream
from baton.common.errors import RequestError

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


@pytest.mark.parametrize("key", ["a\nb", "", "x" * 257, "\ud800"])
def test_a_key_that_no_header_can_hold_is_the_callers_mistake(key: str) -> None:
    with Client("http://127.0.0.1:9", model="fake") as client, pytest.raises(RequestError) as told:
        client.generate("a prompt", key=key)
    assert told.value.field == "key"
    with Client("http://127.0.0.1:9", model="fake") as client, pytest.raises(RequestError):
        client.submit(["a prompt"], key=key)
