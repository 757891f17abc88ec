from __future__ import annotations

import random
from dataclasses import replace

import pytest

from pinyon.core.request import Role
from pinyon.eviction import NO_TRAITS
from pinyon.placement.policies import PLACEMENT_POLICIES
from pinyon.placement.scaling import ScalingSettings
from pinyon.profiles.engine_profile import EngineProfile
from pinyon.profiles.machine_profile import MachineProfile
from pinyon_lab.simulator.cluster import SimCluster
from pinyon_lab.simulator.cluster_settings import ClusterSettings
from pinyon_lab.simulator.report import RequestOutcome
from pinyon_lab.simulator.workload import Arrival
from tests.long import usually
from tests.simulation.leftovers import check_cluster

BLOCK = 16
ENGINE = EngineProfile("s", "", "", 1e-3, 2e-3, 0.0, 5e-3, 1e-4, 2e-8)
MACHINE = MachineProfile("s", "", "", "tiny", 1000, 1, 0, 1e9, 1e7, 1e9)
SETTINGS = ClusterSettings((Role.MIXED,) * 2, BLOCK, 1 << 14, scaling=ScalingSettings(2, 6, slo_s=2.0), boot_s=5.0)


ALL = [
    ("dualmap:slo_s=2", (Role.MIXED,) * 2),
    ("least_loaded", (Role.PREFILL,) * 2 + (Role.DECODE,)),
    ("dualmap:slo_s=2", (Role.PREFILL,) * 2 + (Role.DECODE,)),
    ("least_loaded", (Role.MIXED,) * 2),
]
EACH = ALL[:2]
"""Every policy and every split once."""


def traffic(seed: int, phases: list[tuple[float, float]]) -> list[Arrival]:
    """Returns the arrivals of phases, each given as its end in seconds and its requests per second."""
    rng, now_s, arrivals = random.Random(seed), 0.0, []
    for end_s, per_s in phases:
        while now_s < end_s:
            now_s += rng.expovariate(per_s)
            blocks = tuple(rng.getrandbits(50) for _ in range(rng.randint(8, 16)))
            arrivals.append(Arrival(now_s, len(blocks) * BLOCK, 5, blocks, NO_TRAITS))
    return arrivals


def run(
    settings: ClusterSettings, phases: list[tuple[float, float]], policy: str
) -> tuple[SimCluster, list[RequestOutcome]]:
    cluster = SimCluster(settings, MACHINE, ENGINE, PLACEMENT_POLICIES.make(policy))
    outcomes = cluster.run(traffic(5, phases))
    check_cluster(cluster)
    return cluster, outcomes


@pytest.mark.parametrize(("policy", "roles"), ALL if usually(0, long=1) else EACH)
def test_it_grows_under_load_and_shrinks_again(policy: str, roles: tuple[Role, ...]) -> None:
    """A prompt takes 0.4 s: 9.5 a second are too many for two instances, and few for six."""
    settings = replace(SETTINGS, roles=roles)
    phases = [(110.0, 9.5), (420.0, 1.0)]
    cluster, outcomes = run(settings, phases, policy)
    assert cluster.elasticity is not None
    sizes = cluster.elasticity.sizes
    assert [size for _, size in sizes[:3]] == [2, 4, 6]
    assert sizes[1][0] < 40.0
    assert [size for _, size in sizes[3:]] == [5, 4, 3, 2], "one by one"
    assert {each.end for each in outcomes} == {"finished"}, "who goes finishes what it has"
    late = [each for each in outcomes if 80 < each.arrived_s < 110]
    assert sum(each.ttft_s <= 2 for each in late) >= 0.9 * len(late)
    left = [each for each in cluster.members.engines.values() if each.state.info.role.prefills]
    assert len(left) <= 3, "the last one that goes may not be through when the last request is"
    if policy != "least_loaded":
        return
    fixed, others = run(replace(settings, scaling=None), phases, policy)
    assert fixed.elasticity is None
    late = [each for each in others if 80 < each.arrived_s < 110]
    assert sum(each.ttft_s <= 2 for each in late) < 0.5 * len(late)


def test_a_cluster_with_too_few_gets_the_least() -> None:
    cluster, _ = run(replace(SETTINGS, roles=(Role.MIXED,), scaling=ScalingSettings(3, 6)), [(60.0, 0.5)], "random")
    assert len(cluster.members.engines) == 3


def test_prompts_that_take_longer_than_the_slo_add_none() -> None:
    """Each prompt takes 3.2 s, and no prompt waits."""
    arrivals = [
        Arrival(number * 1.3, 100 * BLOCK, 1, tuple(range(number * 100, number * 100 + 100)), NO_TRAITS)
        for number in range(100)
    ]
    settings = replace(SETTINGS, roles=(Role.MIXED,) * 12, scaling=ScalingSettings(12, 24, slo_s=2.0))
    cluster = SimCluster(settings, MACHINE, ENGINE, PLACEMENT_POLICIES.make("least_loaded"))
    outcomes = cluster.run(arrivals)
    assert cluster.elasticity is not None
    assert [size for _, size in cluster.elasticity.sizes] == [12]
    assert min(each.ttft_s for each in outcomes) > 2.0


@pytest.mark.parametrize(
    "limits", [{"ttft_slo_s": 0.05}, {"tbt_slo_s": 1e-4}, {"scaling": ScalingSettings(2, 6, slo_s=0.05, overload=1e6)}]
)
def test_what_more_instances_would_not_serve_asks_for_none(limits: dict) -> None:
    """Each prompt takes 0.25 s or more by itself, or a step takes longer than tokens may."""
    cluster, _ = run(replace(SETTINGS, **limits), [(60.0, 1.0)], "least_loaded")
    assert cluster.elasticity is not None
    assert max(size for _, size in cluster.elasticity.sizes) == 2
