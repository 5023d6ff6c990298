"""A prefill and a decode worker's cores with a real model over real memory behind each, and the book of what went over.

The transfer plane copies at once (`core_rig`), and the checker looks at both pools after everything that happens.
Whatever is free is full of NaN whenever a step begins: who reads it, shows it.
The reference is one uncached float32 pass of `transformers` over prompt and answer: each output must be the best token
after those before it, which makes the answer the greedy one.
"""

from __future__ import annotations

import dataclasses
import itertools
import queue
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from core_rig import DECODE, Engine, Rig, decode_engine, prefill_engine
from family_rig import COMPONENTS, FAMILIES, VOCAB, WINDOW, save_random_model
from transformers import AutoModelForCausalLM

from baton.common.clock import VirtualClock
from baton.common.config import KvReturn, TiersConfig
from baton.common.engine.batch import Batch, OnLayers, StepResult, Ticket, tell_nobody
from baton.common.engine.core_api import Drain
from baton.common.engine.torch_runner import TorchRunner
from baton.common.kv.layout import Component, KvLayout
from baton.common.kv.pool import KvPool
from baton.common.kv.prefix.configurations import CONFIGURATIONS, shares_prefixes
from baton.common.kv.prefix.names import PrefixCacheName
from baton.common.kv.tiers.api import AbortRestore, AbortStore, TierCommand, TierEvent
from baton.common.kv.tiers.keys import PageKeys
from baton.common.kv.tiers.thread import TierThread
from baton.common.kv.tiers.tiers import open_tiers
from baton.common.kv.window import most_pages
from baton.common.messages import Output, SamplingParams, Timeline
from baton.transfer.api import OpenSink, ShipRegion

Tokens = npt.NDArray[np.int32]
Write = Literal["through", "back"]

CHUNK = 16
CONTEXT = 256
PAGE_SIZES = (4, 1, 16)
ALIASES = ("radix", "chunk")
NO_COIN_FLIP = 1e-4
"""Of logits around 2 to 12: the best token is at least so much better than the next one, so that rounding (2e-6 to
4e-5) never decides. A prompt that does not keep to this must be another one."""


@dataclass(frozen=True)
class Case:
    cache: PrefixCacheName
    family: str
    page_size: int

    def __str__(self) -> str:
        return f"{self.cache}-{self.family}-{self.page_size}"

    @property
    def layout(self) -> KvLayout:
        have = COMPONENTS[self.family]
        window = WINDOW if Component.SWA in have else 0
        return KvLayout(self.page_size, full=Component.FULL in have, window=window, state=Component.STATE in have)

    @property
    def shares(self) -> bool:
        return shares_prefixes(self.cache)


def fits(name: PrefixCacheName, components: tuple[Component, ...]) -> bool:
    configuration = CONFIGURATIONS[name]
    return configuration.needs <= set(components) and not configuration.lacks & set(components)


def ordinary_cases() -> list[Case]:
    """Every configuration with each kind of model that it is for; families and page sizes take turns."""
    families = {
        kind: itertools.cycle([family for family, components in COMPONENTS.items() if components == kind])
        for kind in COMPONENTS.values()
    }
    sizes = itertools.cycle(PAGE_SIZES)
    names = [name for name in CONFIGURATIONS if name not in ALIASES]
    return [Case(name, next(families[kind]), next(sizes)) for name in names for kind in families if fits(name, kind)]


def all_cases() -> list[Case]:
    """Every configuration with every model that it is for, at every page size."""
    return [
        Case(name, family, page_size)
        for name, (family, components), page_size in itertools.product(
            CONFIGURATIONS, COMPONENTS.items(), sorted(PAGE_SIZES)
        )
        if fits(name, components)
    ]


class Model:
    """A small random model, and what its own code says without any cache."""

    def __init__(self, family: str, directory: Path) -> None:
        torch.set_num_threads(1)
        save_random_model(FAMILIES[family], directory)
        counts = dict.fromkeys(COMPONENTS[family], 2)
        self.family = family
        self.runner = TorchRunner.load(str(directory), dtype="float32", num_pages=counts, page_size=4, threads=1)
        self._reference = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager"
        )
        self._answers: dict[bytes, list[int]] = {}

    @property
    def full_layers(self) -> int:
        """That attend to everything."""
        full = self.runner.memory.buffers.get(Component.FULL)
        return 1 if full is None else full.layers

    def assert_greedy(self, prompt: Tokens, said: list[int]) -> None:
        """`said` is the beginning of the greedy answer."""
        known = self._answers.get(prompt.tobytes(), [])
        common = min(len(known), len(said))
        assert said[:common] == known[:common], self.family
        if len(said) <= len(known):
            return
        with torch.inference_mode():
            logits = self._reference(torch.tensor([prompt.tolist() + said])).logits[0, len(prompt) - 1 : -1].float()
        best, second = logits.topk(2).values.unbind(-1)
        assert said == logits.argmax(-1).tolist(), self.family
        assert (best - second).min() >= NO_COIN_FLIP, "nearly a coin flip: choose another prompt"
        self._answers[prompt.tobytes()] = list(said)


class HarshRunner:
    """A worker's model over memory in which all is NaN that its pool calls free."""

    def __init__(self, model: TorchRunner, pool: KvPool) -> None:
        counts = {component: pool.supply.total(component) + 1 for component in pool.layout.components}
        self._pool = pool
        self._runner = TorchRunner(
            model.model,
            model.info,
            dtype="float32",
            num_pages=counts,
            page_size=pool.page_size,
            cache_dtype=model.cache_dtype,
        )
        self.memory = self._runner.memory
        assert self.memory.layout == pool.layout
        for buffer in self.memory.buffers.values():
            buffer.as_bytes()[:] = 0xFF

    def launch(self, batch: Batch, on_layers: OnLayers = tell_nobody) -> Ticket:
        for component, buffer in self.memory.buffers.items():
            buffer.as_bytes()[self._pool.supply.allocators[component].free_page_ids()] = 0xFF
        return self._runner.launch(batch, on_layers)

    def collect(self, ticket: Ticket) -> StepResult:
        return self._runner.collect(ticket)


class ThreadedTiers:
    """Host memory for four pages and a disk below the decode worker's pool, on their thread. Takes the place of the
    rig's stub, and answers later."""

    def __init__(self, config: TiersConfig, engine: Engine) -> None:
        memory = engine.runner.memory.main
        root = PageKeys.of_model({"weights": "random"}, engine.pool.page_size).root
        levels = open_tiers(
            dataclasses.replace(config, host_bytes=4 * memory.page_bytes), DECODE.worker, root, memory.page_bytes
        )
        assert levels is not None
        self.write: Write = config.write
        self._events: queue.SimpleQueue[TierEvent] = queue.SimpleQueue()
        self._unanswered = 0
        self.thread = TierThread(
            levels,
            memory.as_bytes(),
            self._events.put,
            VirtualClock(),
            max_queued_jobs=config.max_queued_jobs,
            on_fatal=lambda: None,  # then an answer is missing
        )
        self.thread.start()

    def take(self, command: TierCommand) -> list[TierEvent]:
        self._unanswered += not isinstance(command, AbortRestore | AbortStore)
        self.thread.post(command)
        return []

    def answer(self) -> TierEvent | None:
        """Waits for the next one; None when there is nothing to wait for."""
        if not self._unanswered:
            return None
        self._unanswered -= 1
        return self._events.get(timeout=30)


def prompt_of(length: int, seed: int) -> Tokens:
    return np.random.default_rng(seed).integers(3, VOCAB, length).astype(np.int32)


def joined(*parts: Tokens | list[int]) -> Tokens:
    return np.concatenate([np.asarray(part, dtype=np.int32) for part in parts])


@dataclass
class Pair:
    """Two workers of one configuration. The decode worker's pool is too small for what is asked of it at once."""

    case: Case
    model: Model
    disk: Path | None = None  # with it, there are tiers below the decode worker's pool
    write: Write = "through"
    layer_groups: int = 1
    kv_return: KvReturn = "off"  # adaptive would depend on the time that steps take here
    rig: Rig = field(init=False)
    tiers: ThreadedTiers | None = None
    prompts: dict[str, Tokens] = field(default_factory=dict)
    wanted: dict[str, int] = field(default_factory=dict)  # outputs

    def __post_init__(self) -> None:
        layout, cache = self.case.layout, self.case.cache
        most = most_pages(layout, CHUNK, self.case.shares) if layout.window else 0
        tiers = None
        if self.disk is not None:
            tiers = TiersConfig(disk_path=str(self.disk), disk_bytes=1 << 22, write=self.write, restore_min_pages=1)
        decode = decode_engine(
            112 // layout.page_size,
            layout.page_size,
            rows=12,
            context=CONTEXT,
            layout=layout,
            swa_pages=2 * most,
            slots=6,
            cache=cache,
            tiers=tiers,
            chunk_tokens=CHUNK,
            num_reserved_decode_tokens=0,
        )
        prefill = prefill_engine(
            512 // layout.page_size,
            layout.page_size,
            12,
            CONTEXT,
            layout,
            cache=cache,
            kv_return=self.kv_return,
            chunk_tokens=CHUNK,
            layers=self.model.full_layers,
            layer_groups=self.layer_groups,
        )
        for engine in (decode, prefill):
            engine.runner = HarshRunner(self.model.runner, engine.pool)  # type: ignore[assignment]
        self.rig = Rig(decode, prefill)
        if tiers is not None:
            self.tiers = ThreadedTiers(tiers, decode)
            self.rig.tier = self.tiers  # type: ignore[assignment]

    @property
    def decode(self) -> Engine:
        return self.rig.decode

    # ------------------------------------------------------------------------------------------ asking

    def ask(self, name: str, prompt: Tokens, max_tokens: int = 8, session: tuple[str, int] = ("", 0)) -> None:
        self.prompts[name], self.wanted[name] = prompt, max_tokens
        self.rig.submit(name, prompt, SamplingParams(max_tokens=max_tokens), session=session)

    def begin(self, name: str, prompt: Tokens) -> None:
        """Asks, and lets the tiers say what they have."""
        self.ask(name, prompt)
        while self.hear_tiers():
            pass

    def answer(self, name: str, prompt: Tokens, max_tokens: int = 8, session: tuple[str, int] = ("", 0)) -> Timeline:
        """Asks alone, and checks."""
        self.ask(name, prompt, max_tokens, session)
        self.settle()
        return self.check(name)

    def step(self) -> bool:
        """One step of each worker and one answer of the tiers, whose copies are under way during the next steps. False:
        nobody had anything to do."""
        worked = False
        for engine in (self.rig.prefill, self.decode):
            effects = engine.step()
            self.rig.run(effects or [])
            worked |= effects is not None
        return self.hear_tiers() or worked

    def hear_tiers(self) -> bool:
        """Waits for the next answer of the tiers. False: none is to come."""
        event = None if self.tiers is None else self.tiers.answer()
        if event is not None:
            self.rig.run(self.decode.handle(event))
        return event is not None

    def settle(self) -> None:
        """Until nobody has anything to do."""
        while True:
            while self.step():
                pass
            self.rig.settle()  # messages that are due
            if not self.hear_tiers():
                return

    def said(self, name: str) -> list[int]:
        return self.rig.gateway.tokens.get(name, [])

    def final(self, name: str) -> Output:
        return self.rig.gateway.finals[name]

    # ---------------------------------------------------------------------------------------- checking

    def check(self, name: str) -> Timeline:
        """It has all of its answer, token for token, and every prompt token came from somewhere, once."""
        assert len(self.said(name)) == self.wanted[name], self.final(name)
        self.model.assert_greedy(self.prompts[name], self.said(name))
        timeline = self.final(name).timeline
        assert timeline is not None
        kept = timeline.cached_tokens + timeline.restored_tokens
        assert kept + timeline.transferred_tokens + timeline.local_tokens == len(self.prompts[name]), timeline
        return timeline

    def check_begun(self, name: str) -> None:
        """It was given up; what had been said was right."""
        assert self.final(name).failure is not None
        assert len(self.said(name)) < self.wanted[name]
        self.model.assert_greedy(self.prompts[name], self.said(name))

    def end(self) -> None:
        """Ends the conversations. Nobody holds anything then; without sharing nothing is kept either."""
        self.rig.run(self.decode.handle(Drain()))
        self.settle()
        if self.tiers is not None:
            assert self.tiers.thread.stop(timeout_s=30)
        self.rig.assert_clean()
        for engine in (self.rig.decode, self.rig.prefill):
            if not self.case.shares:
                assert engine.pool.free_pages == engine.pool.total_pages

    # ------------------------------------------------------------------------------------------ the book

    def hand_offs(self, *names: str) -> list[OpenSink]:
        """For these requests, in order; not what is returned."""
        opened = [one for one in self.rig.log if isinstance(one, OpenSink) and one.key.attempt >= 0]
        return [one for one in opened if one.request_id in names]

    def spans_sent(self, *names: str) -> Mapping[Component, list[tuple[int, int]]]:
        """Tokens [first, end) that were sent for these requests, in order, by component."""
        keys = {one.key for one in self.hand_offs(*names)}
        spans: dict[Component, list[tuple[int, int]]] = defaultdict(list)
        for one in self.rig.log:
            if isinstance(one, ShipRegion) and one.key in keys and one.part == one.parts - 1:
                spans[one.component].append((one.first_token, one.first_token + one.tokens))
        return spans
