"""The real actor shells around a process that answers no question of a person: each waits until `let_go`."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from baton.deploy.gateway import GatewayActor
from baton.transfer.actor import HEALTH, ProcessReport, in_group
from baton.transfer.worker import Health, WorkerActor


@dataclass(frozen=True, slots=True)
class StuckProcess:
    """As `WorkerProcess` when its engine does not come to the end of a step."""

    released: threading.Event = field(default_factory=threading.Event)

    def status(self) -> None:
        self.released.wait()

    def census(self) -> dict[str, int]:
        self.released.wait()
        return {}

    def progress(self) -> list[str]:
        return ["loaded"]

    def report(self) -> ProcessReport:
        return ProcessReport(None, None)

    def rejoin(self, controller_address: str) -> None:
        pass

    def health(self) -> Health:
        return Health(admitted=True, steps=1, step_age_s=9.0, io_age_s=0.0)


class StuckWorker(WorkerActor):
    def __init__(self, _: None) -> None:
        self._process = StuckProcess()  # type: ignore[assignment]

    @in_group(HEALTH)
    def let_go(self) -> None:
        self._process.released.set()  # type: ignore[attr-defined]


class StuckGateway(GatewayActor):
    """One whose HTTP thread is stuck."""

    def __init__(self, _: None) -> None:
        self._stuck = StuckProcess()
        self._process = None
        self._progress = ["loaded"]

    def start(self) -> None:
        """From here on there is a process to ask."""
        self._process = self._stuck  # type: ignore[assignment]

    @in_group(HEALTH)
    def report(self) -> ProcessReport:
        return self._stuck.report()

    @in_group(HEALTH)
    def let_go(self) -> None:
        self._stuck.released.set()
