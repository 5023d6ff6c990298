"""What was promised to a request, and what came of it. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from baton.common.by_name import ByName
from baton.common.errors import ConfigError

F64 = npt.NDArray[np.float64]
UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
SLO_EXAMPLE = "for example --slo ttft=2s,itl=50ms"
STALLS = 0.01
"""Share of a request's gaps that may be longer than promised. One is always forgiven: short answers have few gaps."""
_GAP_STEP = math.log(1.02)
_SHORTEST_S = 1e-5


@dataclass(frozen=True, slots=True)
class Slo(ByName):
    """`ttft_s`: until the first token. `itl_s`: of a request's gaps between tokens, all but 1 %
    or one. `tpot_s`: of their mean.
    Infinite: nothing was promised."""

    ttft_s: float = math.inf
    itl_s: float = math.inf
    tpot_s: float = math.inf

    def __str__(self) -> str:
        promised = {"ttft": self.ttft_s, "itl": self.itl_s, "tpot": self.tpot_s}
        return ", ".join(f"{name} {told_s(most)}" for name, most in promised.items() if most < math.inf)


def told_s(seconds: float) -> str:
    """2 s, 50 ms."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def parse_slo(text: str) -> Slo:
    """Of `ttft=2s,itl=50ms`. Raises ConfigError."""
    found: dict[str, float] = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if name not in ("ttft", "itl", "tpot") or not equals:
            raise ConfigError("--slo", part, "is none of ttft=…, itl=…, tpot=…", SLO_EXAMPLE)
        if f"{name}_s" in found:
            raise ConfigError("--slo", text, f"promises {name} twice", SLO_EXAMPLE)
        unit = next((unit for unit in ("us", "ms", "s") if value.endswith(unit)), "")
        try:
            found[f"{name}_s"] = seconds = float(value.removesuffix(unit)) * UNITS_S[unit]
        except (ValueError, KeyError) as error:
            raise ConfigError(f"--slo {name}", value, "is no time: a number with us, ms or s", SLO_EXAMPLE) from error
        if not 0 < seconds < math.inf:
            raise ConfigError(f"--slo {name}", value, "must be positive and finite", SLO_EXAMPLE)
    return Slo(**found)


class Gaps:
    """How many gaps between tokens were how long, to 2 %."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def add(self, gap_s: float, count: int = 1) -> None:
        place = math.ceil(math.log(max(gap_s, _SHORTEST_S) / _SHORTEST_S) / _GAP_STEP)
        self._counts[place] = self._counts.get(place, 0) + count

    def percentile(self, share: float) -> float:
        """nan when there are none."""
        wanted = share * sum(self._counts.values())
        for place in sorted(self._counts):
            wanted -= self._counts[place]
            if wanted <= 0:
                return _SHORTEST_S * math.exp(place * _GAP_STEP)
        return math.nan


@dataclass(slots=True)
class Answer:
    """One request's. `stalls`: gaps longer than promised; the first one is that between the first and second token."""

    arrival_s: float
    outputs: int
    first_s: float = math.inf  # when its first token was there
    last_s: float = math.inf
    stalls: int = 0

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.arrival_s

    @property
    def tpot_s(self) -> float:
        return (self.last_s - self.first_s) / (self.outputs - 1) if self.outputs > 1 else 0.0

    def keeps(self, slo: Slo) -> bool:
        """`stalls` were counted for the same promise."""
        stalled = self.stalls > max(1.0, STALLS * (self.outputs - 1))
        return self.ttft_s <= slo.ttft_s and self.tpot_s <= slo.tpot_s and not stalled


@dataclass(slots=True)
class Outcome:
    """Of a trace on a cluster. `busy_s`: worker-seconds of steps, by role."""

    slo: Slo
    answers: list[Answer] = field(default_factory=list)
    gaps: Gaps = field(default_factory=Gaps)
    busy_s: dict[str, float] = field(default_factory=lambda: {"prefill": 0.0, "decode": 0.0})
    said: int = 0  # tokens, so far
    flips: int = 0

    @property
    def attainment(self) -> float:
        """Share of requests to which every promise was kept."""
        return sum(one.keeps(self.slo) for one in self.answers) / len(self.answers)

    @property
    def ttft_s(self) -> F64:
        return np.array([one.ttft_s for one in self.answers])

    @property
    def tpot_s(self) -> F64:
        """Of requests that have gaps."""
        return np.array([one.tpot_s for one in self.answers if one.outputs > 1])
