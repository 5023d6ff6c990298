"""The autoscaling policy on the planner's model: what it would have made of a trace. Pure.

Owns: the drain and the new start of a worker that changes its role. A worker that leaves takes nothing new and finishes
what it has; it comes back in its other role, with an empty cache, `restart_s` after its last request.
"""

from __future__ import annotations

from msgspec import structs

from baton.common.ids import WorkerId
from baton.deploy.autoscale import Flip, Policy, Scaler, Seat
from baton.deploy.planner.cluster import Knobs, ModelCluster, Split
from baton.deploy.planner.outcome import Outcome
from baton.deploy.planner.traces import Trace
from baton.deploy.planner.workers import DecodeWorker, PrefillWorker

LOOK_S = 1.0


class ScaledCluster:
    """A cluster of the model whose workers change roles as the policy says. `flips`: when which."""

    def __init__(self, policy: Policy, split: Split, knobs: Knobs | None = None) -> None:
        assert split.prefill, "roles are apart"
        self.cluster = ModelCluster(policy.cost, split, policy.slo, knobs)
        self.flips: list[tuple[float, Flip]] = []
        self._scaler = Scaler(policy)
        self._leaving: list[PrefillWorker | DecodeWorker] = []
        self._back_s = 0.0

    def serve(self, trace: Trace) -> Outcome:
        self.cluster.at(0.0, self._look)
        outcome = self.cluster.serve(trace)
        outcome.flips = len(self.flips)
        return outcome

    def _look(self) -> None:
        cluster, now = self.cluster, self.cluster.now
        self._finish_changes(now)
        demand = structs.replace(cluster.demand, said=cluster.outcome.said)
        changing = bool(self._leaving) or now < self._back_s
        self._scaler, flips = self._scaler.look(demand, self._seats(), changing, now)
        for flip in flips:
            self.flips.append((now, flip))
            worker = cluster.prefill.get(flip.worker) or cluster.decode[flip.worker]
            worker.draining = True
            self._leaving.append(worker)
        if cluster.serving:
            cluster.at(now + LOOK_S, self._look)

    def _seats(self) -> dict[WorkerId, Seat]:
        seats = {name: Seat("prefill", one.requests) for name, one in self.cluster.prefill.items() if not one.draining}
        return seats | {
            name: Seat("decode", one.requests) for name, one in self.cluster.decode.items() if not one.draining
        }

    def _finish_changes(self, now: float) -> None:
        done = [worker for worker in self._leaving if worker.idle]
        self._leaving = [worker for worker in self._leaving if not worker.idle]
        for worker in done:
            self._back_s = now + self._scaler.policy.restart_s
            self.cluster.remove(worker)
            if isinstance(worker, PrefillWorker):
                self.cluster.add_decode(self._back_s)
            else:
                self.cluster.add_prefill(self._back_s)
