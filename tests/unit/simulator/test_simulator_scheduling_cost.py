"""The wait of a simulated engine for its scheduler, and the blocks that groups of a batch share, by hand."""

from __future__ import annotations

import pytest

from pinyon.core.request import Role
from pinyon.eviction import NO_TRAITS
from pinyon.placement.policies import PLACEMENT_POLICIES
from pinyon.profiles.engine_profile import EngineProfile
from pinyon.profiles.machine_profile import load_machine
from pinyon_lab.simulator.cluster import SimCluster
from pinyon_lab.simulator.cluster_settings import ClusterSettings, SchedulingCost
from pinyon_lab.simulator.leap import Leap
from pinyon_lab.simulator.workload import Arrival

ENGINE = EngineProfile("", "", "", 0.0, 1e-3, 0.0, 0.01, 0.0, 1e-4, 0.5)


def cluster(settings: ClusterSettings) -> SimCluster:
    return SimCluster(settings, load_machine("tiny"), ENGINE, PLACEMENT_POLICIES.make("round_robin"))


def test_steps_wait_for_the_scheduler_longer_while_others_wait() -> None:
    """A prompt of 16 tokens and three decoded tokens take four steps.

    Memory suffices for one of the two requests, so the other waits in each of the first request's steps."""
    cost = SchedulingCost(0.25, 2.0)
    one = cluster(ClusterSettings((Role.MIXED,), 16, 32, scheduling=cost))
    first, second = one.run([Arrival(0.0, 16, 4, (block,), NO_TRAITS) for block in (1, 2)])
    steps_s = 0.016 + 3 * 0.01 + 1e-4 * (17 + 18 + 19)
    # The first prompt begins before the second request arrives.
    assert first.e2e_s == pytest.approx(4 * 0.25 + 3 * 2.0 + steps_s)
    assert second.e2e_s == pytest.approx(first.e2e_s + 4 * 0.25 + steps_s)
    (engine,) = one.members.engines.values()
    assert engine.stalled_s == pytest.approx(8 * 0.25 + 3 * 2.0)
    assert engine.decode_sums.seconds == pytest.approx(2 * (steps_s - 0.016)), "waiting is no part of a step"
    assert engine.prompt_tokens == 32
    assert first.tbt_s > 2.0, "between tokens it is"


def test_the_grouped_kernel_reads_each_groups_prefix_once() -> None:
    """Two groups of two requests share a block each, of which the second request of each group reads half.

    The first request is a step ahead: two steps decode all four requests, one step the three others."""
    prompts = [(1 + group, 10 * group + each) for group in (1, 2) for each in (1, 2)]

    def read(kernel: str) -> float:
        one = cluster(ClusterSettings((Role.MIXED,), 16, 16_384, attention_kernel=kernel))
        rounds = (0.0, 1), (9.0, 4)
        one.run([Arrival(time_s, 32, tokens, each, NO_TRAITS) for time_s, tokens in rounds for each in prompts])
        (engine,) = one.members.engines.values()
        assert engine.decode_sums.steps == 4
        return engine.decode_sums.kv_tokens

    assert read("whole") == 4 * (33 + 34 + 35)
    assert read("grouped") == read("whole") - (2 + 2 + 1) * 0.5 * 16


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="waiting_s of scheduling must be from 0 to 60 seconds"):
        SchedulingCost(0.0, -1.0)
    with pytest.raises(ValueError, match="step_s of scheduling"):
        SchedulingCost(61.0)
    with pytest.raises(ValueError, match="attention_kernel must be"):
        ClusterSettings((Role.MIXED,), 16, 32, attention_kernel="fast")


@pytest.mark.parametrize("growth_s", [0.0, 0.5])
def test_a_leap_ends_with_the_step_under_way_or_waited_for(growth_s: float) -> None:
    """The steps take 2, 2.5, 3 ... s with a wait of 1 s before each; the first began at 10 s."""
    ends = [10 + sum(2 + growth_s * each for each in range(count)) + count - 1 for count in range(1, 6)]
    for count, end_s in enumerate(ends, start=1):
        for now_s in (end_s, end_s - 0.25, (ends[count - 2] if count > 1 else 10.0) + 0.25):
            leap = Leap(10.0, 2.0, growth_s, 1.0, 6)
            assert leap.shorten(now_s)
            assert (leap.count, leap.end_s) == (count, pytest.approx(end_s)), now_s
