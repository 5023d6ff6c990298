"""Whether a process that says Hello fits into a cluster, and whom it may work with. Pure.

Owns: the rules of admission by version. Never: a seat, or what becomes of a process that does not fit.

- It must speak a wire version that everybody speaks who is there, and the controller.
- Processes of one revision are one group: one that differs from the others of its own revision was meant to be like
  them, and is refused. Those of another revision may differ: while a cluster is upgraded it has two groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from baton.common.compat import (
    NO_GROUP,
    OLDEST_PROTOCOL_VERSION,
    common_wire_version,
    differences,
    group_of,
    wire_versions,
)
from baton.common.messages import PROTOCOL_VERSION, Hello, Member

OUR_VERSIONS = range(OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION + 1)


@dataclass(frozen=True, slots=True)
class Misfit:
    """Why a process cannot be admitted. `differences`: field -> "its != theirs"."""

    reason: str
    differences: Mapping[str, str] = field(default_factory=dict)


def misfit(hello: Hello, revision: int, there: Iterable[tuple[int, Member]]) -> Misfit | None:
    """`there`: the members, each with the revision that it was started with."""
    theirs = hello.member.fingerprint
    versions = wire_versions(theirs, hello.protocol_version)
    everybody = list(there)
    speakers = [(one.stamp.worker, wire_versions(one.fingerprint, PROTOCOL_VERSION)) for _, one in everybody]
    for name, other in [("the controller", OUR_VERSIONS), *speakers]:
        if common_wire_version(versions, other) is None:
            found = {"protocol_version": f"{_told(versions)} != {_told(other)} of {name}"}
            return Misfit("another version of Baton", found)
    alike = next((one for its_revision, one in everybody if its_revision == revision and one.group), None)
    if alike is not None and group_of(theirs) not in (NO_GROUP, alike.group):
        reason = "its KV pages cannot be exchanged with the others'"
        return Misfit(reason, differences(theirs, alike.fingerprint))
    return None


def _told(versions: range) -> str:
    first, last = versions[0], versions[-1]
    return str(first) if first == last else f"{first}-{last}"
