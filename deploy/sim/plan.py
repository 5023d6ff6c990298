"""What named scenarios are written with: a planned world, notes of what was seen, and the judgement of both.

A scenario drives the real cores into one interleaving that has broken other systems, and says whether it was reached.
One that no longer reaches its danger fails: it would prove nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton.common.engine.fake_runner import fake_answer
from baton.common.ids import NO_SESSION, RequestId, SessionId
from baton.common.kv.prefix.interface import I32
from baton.common.messages import (
    Frame,
    SamplingParams,
)
from baton.deploy.sim.clients import ClientRequest
from baton.deploy.sim.settings import WorldSettings
from baton.deploy.sim.worker import WorkerProcess
from baton.deploy.sim.world import Report, World

BASE = WorldSettings(region_pages=1, region_s=0.02, arrival_s=0.1, pull_lane=0.0, fault_s=0.0)
FIRST_S = 1.5
"""Everything is up by then."""


class DangerMissed(AssertionError):
    """Nothing was wrong, but the interleaving that the scenario is for did not happen."""


def must(happened: object, what: str) -> None:
    if not happened:
        raise DangerMissed(what)


@dataclass(frozen=True, slots=True)
class Scenario:
    """`reached` is called after the world has come to rest; it raises DangerMissed when the danger was missed."""

    world: World
    reached: Callable[[Report], None]


class Plan:
    """A world in the making, and notes of what was seen in it."""

    def __init__(self, settings: WorldSettings, seed: int) -> None:
        self.world = World(settings, seed)
        self.requests: list[ClientRequest] = []
        self.seen: dict[str, int] = {}

    def request(
        self, length: int, max_tokens: int = 8, at_s: float = FIRST_S, shared: int = 0, logprobs: int = -1
    ) -> ClientRequest:
        """Enters one request; the first `shared` prompt tokens are those of all others."""
        number = len(self.requests)
        rng = np.random.default_rng([self.world.seed, number])
        prompt = np.concatenate([np.arange(shared), rng.integers(0, 258, length - shared)]).astype(np.int32)
        return self._enter(prompt, max_tokens, at_s, logprobs)

    def _enter(self, prompt: npt.NDArray[np.int32], max_tokens: int, at_s: float, logprobs: int = -1) -> ClientRequest:
        number = len(self.requests)
        sampling = SamplingParams(temperature=0.7, seed=number, max_tokens=max_tokens, logprobs=logprobs)
        return self.enter(ClientRequest(RequestId(f"r{number}"), prompt, sampling, None), at_s)

    def enter(self, request: ClientRequest, at_s: float) -> ClientRequest:
        self.requests.append(request)
        self.world.clients.planned += 1
        self.world.schedule.at(at_s, lambda: self.world.submit(request))
        return request

    def conversation(self, prompts: Sequence[npt.NDArray[np.int32]], every_s: float) -> None:
        """One request after the other, as turns are: each prompt has what was said before."""
        for turn, prompt in enumerate(prompts):
            self._enter(prompt, 8, FIRST_S + every_s * turn)

    def turns(self, count: int, first: int, more: int, salt: int = 0) -> list[npt.NDArray[np.int32]]:
        """Prompts of one conversation: `first` tokens, then each the one before, its answer, and `more` tokens. To be
        entered before another one's are made: an answer depends on the number of its request."""
        rng = np.random.default_rng([self.world.seed, 0x7A1C, salt])
        number = len(self.requests)
        prompts = [rng.integers(0, 258, first).astype(np.int32)]
        while len(prompts) < count:
            sampling = SamplingParams(temperature=0.7, seed=number + len(prompts) - 1, max_tokens=8)
            said = fake_answer(prompts[-1], sampling, self.world.settings.max_context_len).tokens
            prompts.append(np.concatenate([prompts[-1], said, rng.integers(0, 258, more)]).astype(np.int32))
        return prompts

    def note(self, what: str) -> None:
        self.seen[what] = self.seen.get(what, 0) + 1

    def once(self, probe: str, wanted: Callable[[object], bool], action: Callable[[object], None]) -> None:
        """`action` for the first hit of `probe` that is wanted, just after it."""
        done = False

        def hook(world: World, details: object) -> None:
            nonlocal done
            if not done and wanted(details):
                done = True
                world.schedule.after(0.0, lambda: action(details))

        self.world.on(probe, hook)

    def ready(self, *musts: str, all_complete: bool = True) -> Scenario:
        """`musts` must have been noted."""
        self.world.calm_s = FIRST_S + 1.0

        def reached(report: Report) -> None:
            missing = [one for one in musts if not self.seen.get(one)]
            must(not missing, f"never seen: {', '.join(missing)} (seen {self.seen})")
            for request in self.requests:
                complete = request.outcome in ("stop", "length")
                assert complete or request.cancelled or not all_complete, f"{request.request_id}: {request.ended}"

        return Scenario(self.world, reached)


def asking(name: str, prompt: I32, tokens: int = 8, session: SessionId = NO_SESSION) -> ClientRequest:
    """A request of this very prompt, to be entered."""
    sampling = SamplingParams(temperature=0.7, seed=len(prompt), max_tokens=tokens)
    return ClientRequest(RequestId(name), prompt, sampling, None, session)


def worker_of(details: object, role: str) -> WorkerProcess | None:
    process = details[0] if isinstance(details, tuple) else None
    return process if isinstance(process, WorkerProcess) and process.role == role else None


def body_of(details: object) -> object:
    """The frame's body, of a probe (process, frame)."""
    second = details[1] if isinstance(details, tuple) else None
    return second.body if isinstance(second, Frame) else None


def second_of(details: object) -> object:
    return details[1] if isinstance(details, tuple) else None
