"""Who can work with whom while processes of two versions are in one cluster. Pure.

Owns: what a process says of itself in its fingerprint, the group that follows from it, and the words for what differs.
Never: decides what becomes of a process that differs (the controller does).

Two questions, two answers. Can they *talk*? Each speaks the wire versions from `OLDEST_PROTOCOL_VERSION` to
`PROTOCOL_VERSION`; all processes of a cluster need one in common. Can they *share KV*, and go on with each other's
answers? Everything else in the fingerprint must agree: what the bytes of a page are, and which model computed them. But
not their order within a layer of a page (`kv.page_layout`): whoever receives pages puts them into its own.
Those for which it does are a group, and hand-offs and answers that have begun stay within it. To agree is an
equivalence, so a group needs no memory: its name is a digest of what its members agree on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import xxhash

from baton.common.kv.page_layout import PAGE_LAYOUT
from baton.common.messages import PROTOCOL_VERSION

OLDEST_PROTOCOL_VERSION = PROTOCOL_VERSION
"""The oldest version whose frames this one understands, and whose readers understand what this one sends to them."""
KV_VERSION = 1
"""To be raised when the same weights come to compute other KV, or other tokens, than the release before."""

WEIGHTS = "weights"
WIRE = "wire"
RELEASE = "release"
_NOT_COMPARED = frozenset({WIRE, RELEASE, PAGE_LAYOUT})
_RANGE = re.compile(r"(\d{1,6})-(\d{1,6})", re.ASCII)
NO_GROUP = ""
"""Of processes without KV."""


def spoken(release: str) -> dict[str, str]:
    """What every process says of itself, whatever it does."""
    return {WIRE: f"{OLDEST_PROTOCOL_VERSION}-{PROTOCOL_VERSION}", RELEASE: release}


def rounded_weights(weights: str) -> dict[str, str]:
    """What a process says of its weights (`model.weights`): nothing while they are as they came."""
    return {} if weights == "dtype" else {WEIGHTS: weights}


def wire_versions(fingerprint: Mapping[str, str], newest: int) -> range:
    """Those that a process understands. One that says nothing of them understands `newest`, which its Hello has."""
    found = _RANGE.fullmatch(fingerprint.get(WIRE, ""))
    versions = range(int(found[1]), int(found[2]) + 1) if found else range(0)
    return versions or range(newest, newest + 1)


def common_wire_version(versions: range, other: range) -> int | None:
    """The newest that both understand."""
    newest = min(versions.stop, other.stop) - 1
    return newest if newest >= max(versions.start, other.start) else None


def group_of(fingerprint: Mapping[str, str]) -> str:
    """The name of the group that this process is of."""
    agreed = compared(fingerprint)
    if not agreed:
        return NO_GROUP
    lines = "\n".join(f"{name}={value}" for name, value in sorted(agreed.items()))
    return str(xxhash.xxh3_64_hexdigest(lines.encode()))[:8]


def differences(theirs: Mapping[str, str], ours: Mapping[str, str]) -> dict[str, str]:
    """Field -> "theirs != ours", of what must agree within a group."""
    first, second = compared(theirs), compared(ours)
    return {
        name: f"{first.get(name, '(missing)')} != {second.get(name, '(missing)')}"
        for name in sorted(first.keys() | second.keys())
        if first.get(name) != second.get(name)
    }


def compared(fingerprint: Mapping[str, str]) -> dict[str, str]:
    """What must agree within a group."""
    return {name: value for name, value in fingerprint.items() if name not in _NOT_COMPARED}
