"""How much of a worker's KV memory each component gets. Pure arithmetic; allocates nothing.

With R requests at a time, and P the most sliding pages that one of them needs (`window.most_pages`):

- recurrent states: 3 slots per request (its own, the checkpoint it began with, the one it makes next); of `pool_bytes`
  at most a quarter beside paged components, and all of it without any;
- sliding pages beside full attention: 2 R P, half of them for the cache, but never more than there are pages of full
  attention: each page of a window belongs to tokens that full attention keeps too;
- the rest is the first component's.

A count that the configuration gives is taken as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from baton.common.config import KvConfig
from baton.common.errors import ConfigError
from baton.common.kv.layout import Component, KvLayout
from baton.common.kv.parts import LEAST_STATE_SLOTS
from baton.common.kv.prefix.configurations import shares_prefixes
from baton.common.kv.window import most_pages
from baton.common.units import format_bytes, pages_for_tokens

LEAST_PAGES = 4
SLOTS_PER_REQUEST = 3
STATE_SHARE = 4
CACHE_FACTOR = 2


@dataclass(frozen=True, slots=True)
class Load:
    """What a pool is sized for: requests at a time, most tokens that a step computes of one, tokens of the longest."""

    requests: int
    step_tokens: int
    longest: int


def count_fields(layout: KvLayout) -> dict[Component, str]:
    """The setting of `kv` that counts each component: `num_pages` is the first one's."""
    fields = {Component.FULL: "num_pages", Component.SWA: "swa_pages", Component.STATE: "state_slots"}
    return {one: fields[one] if index else "num_pages" for index, one in enumerate(layout.components)}


def decided_counts(kv: KvConfig, layout: KvLayout) -> dict[Component, int]:
    """Of a resolved configuration. Raises ConfigError for one that is not."""
    counts: dict[Component, int] = {}
    for component, field in count_fields(layout).items():
        count = getattr(kv, field)
        if not count:
            reason = f"is undecided, and this model has {component} layers"
            raise ConfigError(f"kv.{field}", count, reason, "start workers with a resolved configuration")
        counts[component] = count
    return counts


def size_pools(layout: KvLayout, unit_bytes: Mapping[Component, int], kv: KvConfig, load: Load) -> dict[Component, int]:
    """Pages and slots of each component, without the null ones. `unit_bytes`: of a page, and of a state. Raises
    ConfigError that names the setting, mostly kv.pool_bytes."""
    fields, first = count_fields(layout), layout.components[0]
    given = {one: count for one, field in fields.items() if (count := getattr(kv, field)) is not None}
    pages = most_pages(layout, load.step_tokens, shares_prefixes(kv.prefix_cache))
    counts = dict(given)
    left = kv.pool_bytes
    if layout.state and layout.paged:
        most = load.requests * SLOTS_PER_REQUEST
        affordable = most if first in given else left // STATE_SHARE // unit_bytes[Component.STATE]
        counts.setdefault(Component.STATE, min(most, affordable))
        left -= counts[Component.STATE] * unit_bytes[Component.STATE]
    if layout.window and layout.full:
        pair = unit_bytes[Component.FULL] + unit_bytes[Component.SWA]
        affordable = given[first] if first in given else left // pair
        counts.setdefault(Component.SWA, min(CACHE_FACTOR * load.requests * pages, affordable))
        left -= counts[Component.SWA] * unit_bytes[Component.SWA]
    counts.setdefault(first, max(0, left) // unit_bytes[first])
    least = {Component.FULL: LEAST_PAGES, Component.SWA: LEAST_PAGES, Component.STATE: LEAST_STATE_SLOTS}
    if layout.window:
        least[Component.SWA] = max(LEAST_PAGES, min(pages, pages_for_tokens(load.longest, layout.page_size)))
    for component in layout.components:
        if counts[component] < least[component] and not (component in given and component is Component.FULL):
            field = fields[component] if component in given else fields[first] if first in given else "pool_bytes"
            what = "slots" if component is Component.STATE else "pages"
            need = f"{least[component]} {component} {what} of {format_bytes(unit_bytes[component])}"
            raise ConfigError(f"kv.{field}", getattr(kv, field), f"too small: less than {need}")
    return {component: counts[component] for component in layout.components}
