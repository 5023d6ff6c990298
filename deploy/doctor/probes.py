"""What an examination needs of probes, wherever they run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec
from msgspec import Struct

from baton.common.ids import WorkerId
from baton.deploy.doctor.shapes import Answer, Request


class Silent(Struct, frozen=True):
    """A probe that did not answer, and what is known of why."""

    reason: str


class Probes(Protocol):
    def ask(self, requests: Mapping[WorkerId, Request], within_s: float) -> dict[WorkerId, Answer | Silent]:
        """All at the same time. Returns by then, with an entry for each; one that hangs is silent."""
        ...

    def close(self) -> tuple[WorkerId, ...]:
        """Ends all of them, those that hang too. Which could not be proven gone."""
        ...


def decode_answer(data: bytes) -> Answer | Silent:
    """Of a probe that may be of another version."""
    try:
        return msgspec.json.decode(data, type=Answer)
    except msgspec.DecodeError as error:
        return Silent(f"its answer is not understood, its Baton may be another version: {error}")
