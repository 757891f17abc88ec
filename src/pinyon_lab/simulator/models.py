"""Models of a cluster to which a trace can be sent: each runs, reports, and exists in any size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pinyon.batching.interface import ServiceOrder
from pinyon.batching.service_order import SERVICE_ORDER_DEFAULT, SERVICE_ORDERS
from pinyon.placement.policies import PLACEMENT_POLICIES
from pinyon.profiles.engine_profile import EngineProfile
from pinyon.profiles.machine_profile import MachineProfile
from pinyon_lab.simulator.cluster import SimCluster
from pinyon_lab.simulator.cluster_settings import ClusterSettings
from pinyon_lab.simulator.prefill_reference import PrefillReference, ReferenceSettings
from pinyon_lab.simulator.report import cluster_report, report
from pinyon_lab.simulator.workload import Arrival

Rows = Sequence[Any]
"""A named tuple for each request, in order of the requests."""


@dataclass(frozen=True, slots=True)
class RunLimits:
    """The limits by which a run is judged, in seconds."""

    slo_s: float
    """The SLO of the TTFT."""
    tbt_slo_s: float
    warm_up: int
    """The number of leading requests that do not count."""


def utilised(engine: EngineProfile, share: float) -> EngineProfile:
    """Returns the profile of an engine that computes prompts at a share of its stated speed."""
    token_s, pair_s = engine.prefill_token_s / share, engine.prefill_pair_s / share
    return replace(engine, prefill_token_s=token_s, prefill_pair_s=pair_s)


@dataclass(frozen=True)
class ReferenceModel:
    """The model of :mod:`pinyon_lab.simulator.prefill_reference`."""

    settings: ReferenceSettings
    policy: str
    order: str = SERVICE_ORDER_DEFAULT

    def run(self, arrivals: Sequence[Arrival], progress: Callable[[int], None]) -> Rows:
        def make() -> ServiceOrder[Any]:
            return SERVICE_ORDERS.make(self.order)

        return PrefillReference(self.settings, PLACEMENT_POLICIES.make(self.policy), make).run(arrivals, progress)

    def report(self, rows: Rows, limits: RunLimits) -> dict[str, float]:
        return report(rows, limits.slo_s, limits.warm_up)

    def resized(self, instances: int) -> ReferenceModel:
        """Returns the same model of another size."""
        return replace(self, settings=replace(self.settings, instances=instances))


@dataclass(frozen=True)
class ClusterModel:
    """The model of :class:`pinyon_lab.simulator.cluster.SimCluster`; ``clients`` of a closed loop, 0: an open one."""

    settings: ClusterSettings
    machine: MachineProfile
    engine: EngineProfile
    policy: str
    seed: int = 0
    clients: int = 0

    def cluster(self) -> SimCluster:
        return SimCluster(self.settings, self.machine, self.engine, PLACEMENT_POLICIES.make(self.policy), self.seed)

    def run(self, arrivals: Sequence[Arrival], progress: Callable[[int], None]) -> Rows:
        return self.cluster().run(arrivals, self.clients, progress)

    def report(self, rows: Rows, limits: RunLimits) -> dict[str, float]:
        return cluster_report(rows, limits.slo_s, limits.tbt_slo_s, limits.warm_up)

    def resized(self, instances: int) -> ClusterModel:
        """Returns the same model of another size: roles in the same proportion, at least one instance of each."""
        kinds = list(dict.fromkeys(self.settings.roles))
        had = [self.settings.roles.count(kind) for kind in kinds]
        counts = [max(1, instances * each // len(self.settings.roles)) for each in had]
        counts[0] = max(1, counts[0] + instances - sum(counts))
        roles = tuple(kind for kind, number in zip(kinds, counts, strict=True) for _ in range(number))
        return replace(self, settings=replace(self.settings, roles=roles))


Model = ReferenceModel | ClusterModel
