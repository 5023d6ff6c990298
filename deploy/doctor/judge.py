"""All that is wrong with what an examination found. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from baton.common.compat import WIRE, compared, wire_versions
from baton.common.config import NODE_ADDRESS
from baton.deploy.doctor.findings import Finding, Severity
from baton.deploy.doctor.judge_hosts import judge_host
from baton.deploy.doctor.judge_pairs import judge_pairs, same_host
from baton.deploy.doctor.shapes import Found

MUST_AGREE = ("ray", "python")
"""Of versions: else Ray does not let the host in. Others may differ, and are told."""
COMPARED = (*MUST_AGREE, "baton", "torch", "pyzmq", "libzmq", "msgspec", "ucxx")
COMPUTE_ROLES = ("prefill", "decode")


def judge(found: Found) -> list[Finding]:
    return list(_judge(found))


def _judge(found: Found) -> Iterator[Finding]:
    for host in found.hosts:
        yield from judge_host(host, found.config)
    facts = {host.name: host.facts for host in found.hosts if host.facts is not None}
    yield from _versions({name: one.versions for name, one in facts.items()})
    yield from _frames({name: one.wire for name, one in facts.items()})
    layouts = {name: one.layout for name, one in facts.items() if not one.model_trouble}
    yield from _agreement(
        "layout", Severity.FAIL, layouts, "the same model, files and settings everywhere: KV must fit"
    )
    members = {str(one.worker): compared(one.fingerprint) for one in found.members if one.role in COMPUTE_ROLES}
    way_out = "normal during an upgrade: hand-offs stay among workers of one layout (docs/UPGRADES.md)"
    yield from _agreement("layout of workers", Severity.WARN, members, way_out)
    yield from _interface(found)
    yield from judge_pairs(found)
    for probe in found.left:
        yield Finding("left behind", Severity.FAIL, "its end could not be proven", "end it by hand", where=probe)


def _versions(by_host: Mapping[str, Mapping[str, str]]) -> Iterator[Finding]:
    """Python may differ in its last number."""
    agreed = []
    for name in COMPARED:
        values = {host: versions.get(name, "") for host, versions in by_host.items()}
        if name == "python":
            values = {host: ".".join(value.split(".")[:2]) for host, value in values.items()}
        usual = _usual(values)
        if len(set(values.values())) <= 1:
            if usual:
                agreed.append(f"{name} {usual}")
            continue
        for host, value in values.items():
            if value != usual:
                severity = Severity.FAIL if name in MUST_AGREE else Severity.WARN
                told, wanted = f"{name} {value or 'missing'}", f"{name} {usual or 'missing'} as the others"
                yield Finding("version", severity, told, "install the same everywhere: requirements.lock", wanted, host)
    if agreed:
        yield Finding("version", Severity.OK, ", ".join(agreed))


def _frames(by_host: Mapping[str, str]) -> Iterator[Finding]:
    """Whether there is a version of frames that all of them speak."""
    spoken = [wire_versions({WIRE: wire}, 0) for wire in by_host.values()]
    common = max((one.start for one in spoken), default=0) < min((one.stop for one in spoken), default=1)
    if common:
        yield Finding("frames", Severity.OK, f"versions {', '.join(sorted(set(by_host.values())))}")
        return
    usual = _usual(by_host)
    for host, wire in by_host.items():
        if wire != usual:
            way_out = "the same Baton everywhere: these two cannot talk"
            yield Finding("frames", Severity.FAIL, f"versions {wire}", way_out, f"{usual} as the others", host)


def _agreement(
    what: str, severity: Severity, by_place: Mapping[str, Mapping[str, str]], way_out: str
) -> Iterator[Finding]:
    """Each place that differs, with the fields."""
    if len(by_place) < 2:
        return
    fields = list(dict.fromkeys(field for values in by_place.values() for field in values))
    usual = {field: _usual({place: values.get(field, "") for place, values in by_place.items()}) for field in fields}
    agreed = True
    for place, values in by_place.items():
        differing = [field for field in fields if values.get(field, "") != usual[field]]
        if differing:
            agreed = False
            value = ", ".join(f"{field} = {values.get(field, '') or 'missing'}" for field in differing)
            expected = ", ".join(f"{field} = {usual[field] or 'missing'}" for field in differing)
            yield Finding(what, severity, value, way_out, expected, place)
    if agreed:
        yield Finding(what, Severity.OK, f"the same in {len(by_place)} places")


def _usual(values: Mapping[str, str]) -> str:
    """What most have; of equals the first."""
    return Counter(values.values()).most_common(1)[0][0] if values else ""


def _interface(found: Found) -> Iterator[Finding]:
    """The classic: everybody listens on its own loopback, and nobody is heard."""
    facts = [host.facts for host in found.hosts if host.facts is not None]
    several = any(not same_host(facts[0], other) for other in facts[1:])
    if several and found.config.bind_host.startswith(("127.", "localhost", "::1")):
        value = f"bind_host = {found.config.bind_host}, with several hosts"
        way_out = f"--set bind_host={NODE_ADDRESS}"
        yield Finding("cluster interface", Severity.FAIL, value, way_out, "an address that the others reach")
