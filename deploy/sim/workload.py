"""What the clients of a random world want: single requests, and conversations whose turns follow one another.

Owns the plan: which prompts, when, through which gateway. A part that is left out changes nothing about the others.
Answers are `clients`' to judge.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from random import Random
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from baton.common.ids import NO_SESSION, RequestId, SessionId
from baton.common.messages import Grammar, SamplingParams
from baton.deploy.sim.clients import ClientRequest

if TYPE_CHECKING:
    from baton.deploy.sim.settings import WorldSettings
    from baton.deploy.sim.world import World

VOCABULARY = 258
OWNER = "somebody"
END = VOCABULARY - 1
GRAMMARS = (
    Grammar(kind="regex", text="([a-c]{4}-){6}[xyz]"),
    Grammar(kind="choice", text='["yes", "no", "perhaps another time"]'),
    Grammar(kind="json_schema", text='{"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}'),
)
GOES_BACK = 0.2
"""So many turns leave their conversation far behind its end."""
EDITED = 0.25
EDITED_PAGES = 2
"""So many leave it near its end, by about so many pages at most."""


def plan_workload(world: World, first_s: float, left_out: Collection[str]) -> list[str]:
    """Enters everything that clients will ask. Returns the names of the parts."""
    settings, rng = world.settings, world.rng
    families = [[rng.randrange(VOCABULARY) for _ in range(settings.max_prompt)] for _ in range(2)]
    names: list[str] = []
    again, keys, scores, grammars = (Random(world.seed ^ salt) for salt in (0xA6A1, 0x4E7, 0x5C0E, 0x96A))
    asked: list[tuple[npt.NDArray[np.int32], float]] = []
    for number in range(settings.requests):
        request = random_request(number, rng, settings, families)
        if scores.random() < settings.scored:
            top = scores.choice((0, 2))
            request.sampling = msgspec.structs.replace(request.sampling, prompt_logprobs=top)
        request.tenant = keys.choice(settings.keys)
        if grammars.random() < settings.guided:
            request.sampling = guided(request.sampling, grammars)
        gateway, at_s = rng.randrange(settings.gateways), first_s + rng.random() * settings.arrival_s
        if asked and again.random() < settings.repeats:
            request.prompt, before_s = again.choice(asked)
            at_s = max(at_s, before_s) if again.random() < 0.5 else before_s + again.random() * 0.02
        asked.append((request.prompt, at_s))
        names.append(request.request_id)
        if request.request_id not in left_out:
            world.clients.planned += 1
            world.schedule.at(at_s, partial(world.submit, request, gateway))
    for number in range(settings.conversations):
        conversation = Conversation(world, number, families[0])
        at_s = first_s + rng.random() * settings.arrival_s
        names.append(conversation.name)
        if conversation.name not in left_out:
            world.clients.planned += conversation.turns_left
            world.schedule.at(at_s, conversation.begin)
    return names


def random_request(number: int, rng: Random, settings: WorldSettings, families: list[list[int]]) -> ClientRequest:
    """Prompts of any length; half of them begin like others."""
    length = rng.choice((1, settings.page_size, settings.page_size + 1, rng.randint(1, settings.max_prompt)))
    tokens = [rng.randrange(VOCABULARY) for _ in range(length)]
    if rng.random() < 0.6:
        family = rng.choice(families)
        tokens = (family[: rng.randint(1, len(family))] + tokens)[: settings.max_prompt]
    stop_after = rng.randint(1, settings.max_tokens) if rng.random() < 0.1 else None
    sampling = random_sampling(rng, settings)
    return ClientRequest(
        RequestId(f"r{number}"), np.array(tokens, dtype=np.int32), sampling, stop_after, priority=rng.choice((0, 0, 3))
    )


def random_sampling(rng: Random, settings: WorldSettings) -> SamplingParams:
    temperature, seed = 0.0 if rng.random() < 0.6 else 0.8, rng.randrange(1 << 30)
    return SamplingParams(
        temperature=temperature,
        presence_penalty=1.0 if seed % 4 == 0 else 0.0,
        seed=seed,
        max_tokens=rng.randint(1, settings.max_tokens),
        stop_token_ids=tuple(rng.randrange(VOCABULARY) for _ in range(rng.choice((0, 0, 20)))),
        logprobs=rng.choice((-1, -1, 0, 2)),
    )


def guided(sampling: SamplingParams, rng: Random) -> SamplingParams:
    """The same, with an answer that follows a grammar. It can only end where that says so."""
    return msgspec.structs.replace(sampling, grammar=rng.choice(GRAMMARS), stop_token_ids=(END,))


class Conversation:
    """Each turn's prompt is the one before, its answer, and a few tokens more: now and then without the last ones, as
    when somebody edits the answer, or the turn begins anew further back. It ends with a turn that has no answer. Half
    of them are sessions."""

    def __init__(self, world: World, number: int, opening: list[int]) -> None:
        rng, settings = world.rng, world.settings
        self.name = f"c{number}"
        self._world = world
        self._gateway = rng.randrange(settings.gateways)
        self._session = SessionId(f"s{number}") if rng.random() < 0.5 else NO_SESSION
        self._closes = rng.random() < 0.7
        self.turns_left = rng.randint(2, 5)
        first = opening[: rng.randint(1, max(1, settings.max_prompt // 2))]
        self._said = np.array(first, dtype=np.int32)
        self._asked = [self._draw_turn(rng, settings) for _ in range(self.turns_left)]
        again = Random(f"{world.seed} {self.name}")
        self._goes_back = [again.random() if again.random() < GOES_BACK else 1.0 for _ in range(self.turns_left)]
        most = EDITED_PAGES * settings.page_size + 1
        self._edited = [again.choice((1, again.randint(1, most))) for _ in range(self.turns_left)]

    def _draw_turn(self, rng: Random, settings: WorldSettings) -> tuple[list[int], SamplingParams, float, bool]:
        """What is added to what was said, how it is answered, the pause before, and whether the answer was changed."""
        added = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 12))]
        return added, random_sampling(rng, settings), rng.choice((0.0, 0.05, 1.0)), rng.random() < EDITED

    def begin(self) -> None:
        self._ask(begins=True)

    def _ask(self, *, begins: bool = False) -> None:
        turn = len(self._asked) - self.turns_left
        added, sampling, _, changed = self._asked[turn]
        said = self._said[: -self._edited[turn]] if changed else self._said
        said = said[: max(1, round(len(said) * self._goes_back[turn]))]
        prompt: npt.NDArray[np.int32] = np.concatenate((said, np.array(added, dtype=np.int32)))
        if len(prompt) + 1 >= self._world.settings.max_context_len:
            self._end()
            return
        request = ClientRequest(
            RequestId(f"{self.name}.{turn}"),
            prompt,
            sampling,
            None,
            session_id=self._session,
            begins_session=begins and self._session != NO_SESSION,
            then=self._answered,
        )
        self._world.submit(request, self._gateway)

    def _answered(self, request: ClientRequest) -> None:
        self.turns_left -= 1
        self._said = np.concatenate((request.prompt, np.array(request.tokens, dtype=np.int32)))
        if request.outcome not in ("stop", "length") or not self.turns_left:
            self._end()
            return
        _, _, pause_s, _ = self._asked[len(self._asked) - self.turns_left]
        self._world.schedule.after(pause_s, self._ask)

    def _end(self) -> None:
        self._world.clients.planned -= self.turns_left
        self.turns_left = 0
        if self._closes and self._session != NO_SESSION:
            self._world.schedule.after(0.0, partial(self._world.close_session, self._session, self._gateway))
