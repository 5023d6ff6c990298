"""What a gateway has been asked for, counted for autoscaling. Pure.

What is counted per request is replaced as a whole, so that it may be read on another thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import structs

from baton.common.ids import Stamp
from baton.common.messages import Demand, Timeline


class DemandMeter:
    """One gateway's."""

    def __init__(self) -> None:
        self._counted = Demand()
        self.said = 0  # tokens; whoever hears them adds them here

    @property
    def total(self) -> Demand:
        """From any thread."""
        return structs.replace(self._counted, said=self.said)

    def asked(self, prompt_tokens: int) -> None:
        """A request was admitted."""
        total = self._counted
        self._counted = structs.replace(
            total,
            requests=total.requests + 1,
            tokens=total.tokens + prompt_tokens,
            squares=total.squares + prompt_tokens**2,
        )

    def answered(self, prompt_tokens: int, outputs: int, timeline: Timeline | None) -> None:
        """Completely. Where nobody tells what became of its prompt, all of it was computed."""
        computed = prompt_tokens
        if timeline is not None:
            computed = max(0, timeline.transferred_tokens - timeline.prefill_cached_tokens)
        total = self._counted
        self._counted = structs.replace(
            total,
            ended=total.ended + 1,
            outputs=total.outputs + outputs,
            prompts=total.prompts + prompt_tokens,
            computed=total.computed + computed,
        )


class DemandSum:
    """Of all gateways. One that is gone leaves what it had counted; its successor begins at nothing."""

    def __init__(self) -> None:
        self._of_gone = Demand()
        self._of: dict[Stamp, Demand] = {}

    def heard(self, said: Mapping[Stamp, Demand]) -> Demand:
        """The sum, when these are the gateways that are there."""
        gone = [self._of[stamp] for stamp in self._of if stamp not in said]
        self._of_gone = _sum([self._of_gone, *gone])
        self._of = dict(said)
        return _sum([self._of_gone, *self._of.values()])


def _sum(demands: Iterable[Demand]) -> Demand:
    counts = [structs.astuple(one) for one in demands]
    return Demand(**dict(zip(Demand.__struct_fields__, map(sum, zip(*counts, strict=True)), strict=True)))
