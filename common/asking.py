"""How one thread has something done on another: a future for who asks, a function for who is asked."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

ResultT = TypeVar("ResultT")


def question(function: Callable[[], ResultT]) -> tuple[Future[ResultT], Callable[[], None]]:
    """The second, called once, runs `function` unless the first was cancelled before. What it raises is the asker's."""
    future: Future[ResultT] = Future()

    def answer() -> None:
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(function())
            except Exception as error:  # noqa: BLE001 - the top frame of a foreign question
                future.set_exception(error)

    return future, answer
