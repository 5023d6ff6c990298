"""The settings of routing, and of the events that tell others what is cached. Part of `baton.common.config`."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import Literal, get_args

from baton.common.by_name import ByName
from baton.common.errors import ConfigError

PolicyName = Literal["prefix_aware", "rendezvous", "least_loaded", "power_of_two", "round_robin"]
POLICY_NAMES: tuple[PolicyName, ...] = get_args(PolicyName)
INDEXED_POLICIES: frozenset[str] = frozenset({"prefix_aware"})
"""Of the named ones, those that ask where a prefix is cached. A policy of the user's own may always."""
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
MOST_WORKERS_PER_ROLE = 256
"""Whose events find ports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingConfig(ByName):
    """Which workers a request is sent to (docs/ROUTING.md)."""

    policy: str = "prefix_aware"  # a name, or package.module:function of your own
    max_indexed_pages: int = 1 << 20  # that a gateway remembers of all workers' caches; some 100 bytes each

    @property
    def indexed(self) -> bool:
        """Gateways want to know what workers have cached."""
        return self.policy in INDEXED_POLICIES or self.policy not in POLICY_NAMES


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEventsConfig(ByName):
    """What workers say of their prefix caches to programs outside of the cluster, in vLLM's format. It has no
    authentication: whoever reaches a port reads the tokens of all prompts. Off unless `publish`."""

    publish: bool = False
    host: str = "127.0.0.1"  # the interface that the ports are bound to
    port: int = 5557  # of prefill-0; prefill-i has port + 2i, decode-i has port + 2i + 1
    replay_port: int = 6557  # the same for replays
    topic: str = ""  # may contain {worker} and {model}
    buffer_batches: int = 10_000  # that can be replayed, per worker


def validate_routing(routing: RoutingConfig, events: KvEventsConfig) -> None:
    """Raises ConfigError."""
    if routing.policy not in POLICY_NAMES and not _DOTTED.fullmatch(routing.policy):
        near = difflib.get_close_matches(routing.policy, POLICY_NAMES, n=1)
        hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(POLICY_NAMES)}, or package.module:function"
        raise ConfigError("routing.policy", routing.policy, "there is no such policy", hint)
    for name in ("port", "replay_port"):
        port = getattr(events, name)
        if not 1 <= port <= 65536 - 2 * MOST_WORKERS_PER_ROLE:
            raise ConfigError(f"kv_events.{name}", port, f"must be 1 to {65536 - 2 * MOST_WORKERS_PER_ROLE}")
    if abs(events.port - events.replay_port) < 2 * MOST_WORKERS_PER_ROLE:
        reason = f"ports of {2 * MOST_WORKERS_PER_ROLE} workers follow kv_events.port"
        raise ConfigError("kv_events.replay_port", events.replay_port, reason)
    try:
        events.topic.format(worker="", model="")
    except (KeyError, IndexError, ValueError) as error:
        raise ConfigError("kv_events.topic", events.topic, "only {worker} and {model} can be filled in") from error
