"""The names things go by. Owns no state; every identity that crosses a process is defined here.

A *worker id* ("decode-1") is a seat in the cluster; a *stamp* says which process sits in it. A process that
restarts on the same address gets a new incarnation (from the controller) and a new epoch (random), so a message
for the previous one can never be taken for its own.
"""

from __future__ import annotations

from typing import NewType

import msgspec

WorkerId = NewType("WorkerId", str)
"""A seat in the cluster: "prefill-0", "decode-1", "gateway-0", "controller"."""

CONTROLLER = WorkerId("controller")
"""The one seat that nobody is assigned to: it assigns the others."""

RequestId = NewType("RequestId", str)
"""Chosen by the gateway, never by a client. Compared exactly."""

SessionId = NewType("SessionId", str)
"""A conversation whose KV is kept between turns. Chosen by the gateway; random, so that it cannot be guessed."""

NO_SESSION = SessionId("")

HandoffId = NewType("HandoffId", int)
"""Random 63 bits, chosen by the decode worker; one per request and stay on that worker."""

Epoch = NewType("Epoch", int)
"""Random 63 bits per process start. 0 means "not known yet" and is only legal in a first message."""

PageId = NewType("PageId", int)
"""Index into one pool. Page 0 is the null page: padding is written there, nobody owns it."""


class Stamp(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Which process this is. Two stamps with one worker id and different epochs are different processes."""

    worker: WorkerId
    incarnation: int
    epoch: Epoch


class HandoffKey(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One try at moving one request's KV. The attempt is part of the identity: a retry never meets its past."""

    handoff: HandoffId
    attempt: int
