"""Probes of a doctor with something wrong on one of their hosts. Imported by Ray's workers for `test_doctor_ray.py`."""

from __future__ import annotations

import os
import signal

import msgspec
import ray
from msgspec import structs

from baton.common.messages import Member
from baton.deploy.doctor.ray_probes import ProbeActor
from baton.deploy.doctor.shapes import Answer, Facts, Request, TellTime, WallTime

HOSTS = ("127.0.0.3", "127.0.0.4", "127.0.0.5")
OF_ANOTHER_USER, UNREACHABLE, HANGING = HOSTS[1], HOSTS[2], HOSTS[1]
NOBODY = 65534
SHUT_PORT = 9
AHEAD_S = 2.0


class OddProbe(ProbeActor):
    """One runs as another user, who has another Baton; one has shut its ports, and its clock is ahead."""

    def ask(self, request: bytes) -> bytes:
        answer = msgspec.json.decode(super().ask(request), type=Answer)
        if isinstance(answer, Facts):
            host = answer.facts.address
            if host == OF_ANOTHER_USER and os.getuid() != NOBODY:
                os.setuid(NOBODY)
                return self.ask(request)
            if host == OF_ANOTHER_USER:
                answer.facts.versions["baton"] = "99.0"
            elif host == UNREACHABLE:
                answer = structs.replace(answer, member=_shut(answer.member, host))
        elif isinstance(answer, WallTime) and ray.util.get_node_ip_address() == UNREACHABLE:
            answer = WallTime(answer.wall_s + AHEAD_S)
        return msgspec.json.encode(answer)


class HangingProbe(ProbeActor):
    """One stops for good when it has said what it sees."""

    def ask(self, request: bytes) -> bytes:
        asked = msgspec.json.decode(request, type=Request)
        if isinstance(asked, TellTime) and ray.util.get_node_ip_address() == HANGING:
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().ask(request)


def _shut(member: Member, host: str) -> Member:
    """As if a firewall stood before it."""
    lanes = [
        structs.replace(lane, address={"host": host, "port": SHUT_PORT})
        if lane.lane == "tcp"
        else structs.replace(lane, address={"tcp": f"tcp://{host}:{SHUT_PORT}"})
        if lane.lane == "zmq"
        else lane
        for lane in member.lanes
    ]
    return structs.replace(member, address=f"tcp://{host}:{SHUT_PORT}", lanes=tuple(lanes))
