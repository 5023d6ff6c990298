"""The least process that a controller can have in a seat: says Hello, beats, remembers the membership."""

from __future__ import annotations

import threading

from baton.common.config import LivenessConfig
from baton.common.ids import CONTROLLER, Epoch
from baton.common.messages import PROTOCOL_VERSION, Heartbeat, Hello, Load, Member, Membership
from baton.transfer.actor import HEALTH, WATCH, ProcessReport, at_this_node, in_group
from baton.transfer.keys import ControllerDoor, KeyPair
from baton.transfer.mesh import Mesh
from baton.transfer.process import ProcessSpec, die_with_parent, register_process


class StubActor:
    """What a controller needs of a `ProcessActor`, without an engine. In a cluster named "...-broken" the decode
    workers cannot start; "...-differs": the decode workers have another page layout."""

    def __init__(self, spec: ProcessSpec) -> None:
        register_process(spec.run_dir, spec.name)
        die_with_parent()
        self._spec = spec
        self._stamp = spec.new_stamp()
        self._liveness: LivenessConfig = spec.config.liveness
        self._keys = KeyPair.generate()
        self._mesh = Mesh(self._stamp, at_this_node(spec.config).bind_host, self._keys)
        layout = "b" if spec.role == "decode" and spec.config.cluster.endswith("differs") else "a"
        self._member = Member(
            stamp=self._stamp,
            role=spec.role,
            address=self._mesh.address,
            key=self._keys.public,
            fingerprint={"layout": layout},
        )
        self._view: Membership | None = None
        self._stuck_s = 0.0
        self._controller = spec.controller
        self._watch = threading.Condition()
        self._watcher = 0
        self._admitted = threading.Event()
        self._broken = spec.role == "decode" and spec.config.cluster.endswith("broken")
        if not self._broken:
            threading.Thread(target=self._run, daemon=True).start()

    @in_group(HEALTH)
    def progress(self) -> list[str]:
        return ["nothing to load"]

    @in_group(WATCH)
    def watch(self, watcher: int) -> None:
        if self._broken:
            raise RuntimeError("there is no such model")
        with self._watch:
            self._watcher = watcher
            self._watch.notify_all()
            self._watch.wait_for(lambda: self._watcher != watcher)

    @in_group(HEALTH)
    def report(self) -> ProcessReport:
        member = self._member if self._admitted.is_set() else None
        return ProcessReport(self._spec.role, self._keys.public, member, self._view)

    @in_group(HEALTH)
    def rejoin(self, controller: ControllerDoor) -> None:
        self._controller = controller
        self._mesh.wake()

    @in_group(WATCH)
    def drain(self, timeout_s: float) -> bool:
        return True

    @in_group(HEALTH)
    def view(self) -> Membership | None:
        return self._view

    @in_group(HEALTH)
    def pretend_stuck(self, step_age_s: float) -> None:
        self._stuck_s = step_age_s

    def _run(self) -> None:
        while True:
            door = self._controller
            self._mesh.allow.set_controller(door.key)
            self._mesh.connect(CONTROLLER, door.address, door.key, door.guest if self._view is None else None)
            if self._view is None:
                self._mesh.send(CONTROLLER, Epoch(0), Hello(protocol_version=PROTOCOL_VERSION, member=self._member))
            else:
                self._mesh.send(CONTROLLER, Epoch(0), Heartbeat(load=Load(step_age_s=self._stuck_s)))
            for frame in self._mesh.poll(self._liveness.heartbeat_interval_s):
                if isinstance(frame.body, Membership) and (
                    self._view is None or frame.body.version > self._view.version
                ):
                    self._view = frame.body
                    self._admitted.set()
