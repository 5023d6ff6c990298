"""A routing policy of the user's own, which no request suffers from: where it fails, the default one chooses.

Owns: how often that was. Never: an answer of the policy's that the router could not use.
"""

from __future__ import annotations

import importlib
import operator
from typing import cast

from baton.common.errors import ConfigError
from baton.common.log import EventLog, where_of
from baton.common.routing_config import PolicyName
from baton.deploy.routing.policies import POLICIES, Choice, Policy, prefix_aware


class OwnPolicy:
    """A `Policy` around `policy`, which is found under `name`."""

    def __init__(self, name: str, policy: Policy) -> None:
        self._name = name
        self._policy = policy
        self.failures = 0
        self._log = EventLog("baton.routing")

    def __call__(self, choice: Choice) -> int | None:
        try:
            answer = self._policy(choice)
        except Exception as error:  # noqa: BLE001 - the top frame of the user's code; a bug in it is no request's end
            return self._instead(choice, where_of(error))
        if answer is None:
            return None
        try:
            place = operator.index(answer)
        except TypeError:
            return self._instead(choice, f"{answer!r:.80} is no place")
        if not 0 <= place < len(choice.takes):
            return self._instead(choice, f"there is no place {place} of {len(choice.takes)}")
        if not choice.takes[place]:
            return self._instead(choice, f"the worker at {place} cannot take the request")
        return place

    def _instead(self, choice: Choice, reason: str) -> int | None:
        self.failures += 1
        self._log.seldom("routing_policy_failed", policy=self._name, role=choice.role, reason=reason)
        return prefix_aware(choice)


def policy_of(name: str) -> Policy:
    """By its name, or from a module of the user's. Raises ConfigError when there is none."""
    if name in POLICIES:
        return POLICIES[cast(PolicyName, name)]
    module, _, function = name.partition(":")
    try:
        found: object = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError("routing.policy", name, str(error), "a function(choice) -> place, or None") from error
    if not callable(found):
        raise ConfigError("routing.policy", name, "is not a function", "a function(choice) -> place, or None")
    return OwnPolicy(name, cast(Policy, found))
