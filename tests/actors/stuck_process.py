"""The real actor shells around a process that answers no question of a person: each waits until `let_go`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from baton.common.errors import ErrorCode, RequestError
from baton.common.kv.layout import Component
from baton.deploy.gateway import GatewayActor
from baton.transfer.actor import HEALTH, in_group
from baton.transfer.io import IoThread
from baton.transfer.keys import KeyPair
from baton.transfer.process import ProcessSpec
from baton.transfer.worker import WorkerActor


class NoSuchModel(Exception):
    pass


@dataclass(frozen=True, slots=True)
class StuckProcess:
    """As a process whose engine, or HTTP thread, does not come to the end of a step. It cannot load."""

    released: threading.Event = field(default_factory=threading.Event)

    def load(self, say: Callable[[str], None]) -> IoThread:
        say("looking for the model")
        raise NoSuchModel("there is none")

    def serve(self) -> None:
        raise AssertionError("served without having loaded")

    def status(self) -> None:
        self.released.wait()

    def census(self) -> dict[str, int]:
        self.released.wait()
        return {}

    def page_owner(self, page: int, component: Component | None) -> str:
        self.released.wait()
        if component is None:
            raise RequestError(ErrorCode.INVALID_REQUEST, f"no page {page}", "page")
        return f"{component} page {page}"


class StuckWorker(WorkerActor):
    def make_process(self, spec: ProcessSpec, keys: KeyPair) -> StuckProcess:  # type: ignore[override]
        self._stuck = StuckProcess()
        self._process = self._stuck  # type: ignore[assignment]
        return self._stuck

    @in_group(HEALTH)
    def let_go(self) -> None:
        self._stuck.released.set()


class StuckGateway(GatewayActor):
    def make_process(self, spec: ProcessSpec, keys: KeyPair) -> StuckProcess:  # type: ignore[override]
        self._stuck = StuckProcess()
        self._process = self._stuck  # type: ignore[assignment]
        return self._stuck

    @in_group(HEALTH)
    def let_go(self) -> None:
        self._stuck.released.set()
