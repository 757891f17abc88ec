"""Full memory must not make an instance compute the same again and again."""

from __future__ import annotations

import random

import pytest

from pinyon.batching import BATCHING_POLICIES
from pinyon.core.request import Role
from pinyon.eviction import NO_TRAITS
from pinyon.placement.policies import PLACEMENT_POLICIES
from pinyon.profiles.engine_profile import load_profile
from pinyon.profiles.machine_profile import load_machine
from pinyon_lab.simulator.cluster import SimCluster
from pinyon_lab.simulator.cluster_settings import ClusterSettings, StepRule
from pinyon_lab.simulator.workload import Arrival
from tests.long import usually

BLOCK = 512
ALL = tuple((rule, batching) for batching in BATCHING_POLICIES.names for rule in StepRule)
EACH = tuple(each for number, each in enumerate(ALL) if number // 2 % 2 == number % 2)
"""Every policy once, with both rules equally often."""


@pytest.mark.parametrize(("rule", "batching"), ALL if usually(0, long=1) else EACH)
def test_long_answers_in_full_memory_give_way_seldom(rule: StepRule, batching: str) -> None:
    """A request that waited a second used to preempt others: 149 times here, 100 times a request in fuller memory."""
    machine = load_machine("910b-qwen2.5-7b")
    rng, now_s, arrivals = random.Random(7), 0.0, []
    # The oracle looks at all requests for each choice.
    for number in range(usually(45, long=150) if batching == "oracle" else usually(120, long=300)):
        now_s += rng.expovariate(0.9)
        tokens = int(min(20_000, rng.lognormvariate(8.8, 0.9)))
        blocks = tuple(1000 * number + each for each in range(-(-tokens // BLOCK)))
        arrivals.append(Arrival(now_s, tokens, int(rng.expovariate(1 / 343)) + 1, blocks, NO_TRAITS))
    settings = ClusterSettings((Role.MIXED,), BLOCK, 150_000, step_rule=rule, batching=batching)
    engine = load_profile(machine.engine)
    cluster = SimCluster(settings, machine, engine, PLACEMENT_POLICIES.make("least_loaded"))
    outcomes = cluster.run(arrivals)
    assert {each.end for each in outcomes} == {"finished"}
    assert cluster.counts["preempted"] < len(outcomes) / 10
