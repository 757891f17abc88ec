from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from random import Random

import pytest

from pinyon.core.request import Role
from pinyon.placement.kvcache_centric import KvCacheCentric, KvCacheCentricSettings
from pinyon.placement.policies import PLACEMENT_POLICIES
from pinyon.placement.policy import PlacementRequest
from pinyon.placement.scheduler import Scheduler
from pinyon.placement.threshold_tuner import CLEAR, COST_MAX, LOOKS, SAMPLES_MAX, THRESHOLDS, ThresholdTuner
from tests.on_compiled import REPLACES_METHODS
from tests.unit.placement.conftest import keys, make_fleet, member


def tuned(best: float, start: float, seed: int, rounds: int = 6000, noise: float = 0.5) -> ThresholdTuner:
    """Returns a tuner after requests that take the longer, the farther their threshold is from the best."""
    rng, tuner = Random(seed), ThresholdTuner(start)
    for _ in range(rounds):
        threshold = tuner.draw(rng)
        off = abs(THRESHOLDS.index(threshold) - THRESHOLDS.index(best))
        alone_s = rng.uniform(0.1, 5.0)
        tuner.learn(threshold, alone_s * (1 + 0.5 * off) * rng.uniform(1 - noise, 1 + noise), alone_s)
    return tuner


@pytest.mark.parametrize("start", [1.0, 2.0, 16.0])
@pytest.mark.parametrize("best", [1.0, 3.0, 16.0])
def test_it_finds_what_is_best(best: float, start: float) -> None:
    found = [tuned(best, start, seed).threshold for seed in range(5)]
    assert found == [best] * 5


COSTS: dict[str, Callable[[Random], float]] = {
    "alike": lambda rng: rng.uniform(0.5, 1.5),
    "seldom long": lambda rng: rng.lognormvariate(0, 1),
    "stalls": lambda rng: 100.0 if rng.random() < 0.01 else rng.uniform(1.0, 2.0),
}


@pytest.mark.parametrize("kind", COSTS)
def test_chance_moves_it_seldom(kind: str) -> None:
    """All thresholds are equally good, for as many requests as a public trace has."""
    moved = 0
    for seed in range(40):
        rng, tuner = Random(seed), ThresholdTuner(2.0)
        seen = set()
        for _ in range(12_031):
            tuner.learn(tuner.draw(rng), COSTS[kind](rng), 1.0)
            seen.add(tuner.threshold)
        moved += len(seen) > 1
    assert moved <= 5


@pytest.mark.parametrize("better", [1.5, 3.0])
@pytest.mark.parametrize(("kind", "share", "most"), [("alike", 0.7, 500), ("seldom long", 0.5, 1500)])
def test_what_is_clearly_better_is_soon_in_force(kind: str, share: float, most: int, better: float) -> None:
    """Each neighbour gets a tenth of the requests."""
    for seed in range(10):
        rng, tuner, count = Random(seed), ThresholdTuner(2.0), 0
        while tuner.threshold == 2.0 and count < most:
            threshold = tuner.draw(rng)
            tuner.learn(threshold, COSTS[kind](rng) * (share if threshold == better else 1.0), 1.0)
            count += 1
        assert tuner.threshold == better


class PlainTuner:
    """A tuner that keeps everything, and recomputes what it judges by."""

    def __init__(self) -> None:
        self.at = 3
        self.costs: dict[int, list[float]] = {}

    def learn(self, at: int, cost: float) -> None:
        there = self.costs.setdefault(at, [])
        there.append(min(cost, COST_MAX))
        mine = self.costs.get(self.at, [])
        if len(mine) == SAMPLES_MAX:
            self.costs = {}
        elif abs(at - self.at) == 1 and len(there) in LOOKS and len(mine) >= 32:
            variance = max(statistics.variance(there), statistics.variance(mine))
            error = math.sqrt(variance / len(there) + variance / len(mine))
            if statistics.mean(mine) - statistics.mean(there) > CLEAR * error:
                self.at, self.costs = at, {}


def test_it_is_a_plain_one_that_keeps_everything() -> None:
    """The tuners agree even on late results for thresholds that are no longer neighbours."""
    moves = 0
    for seed in range(8):
        rng, tuner, plain = Random(seed), ThresholdTuner(2.0), PlainTuner()
        worth = [rng.uniform(0.3, 1.0) for _ in THRESHOLDS]
        for _ in range(8000):
            before, threshold = tuner.threshold, tuner.draw(rng)
            if rng.random() < 0.02:
                threshold = rng.choice(THRESHOLDS)
            cost = worth[THRESHOLDS.index(threshold)] * rng.uniform(0.2, 1.8) * (900 if rng.random() < 1e-4 else 1)
            tuner.learn(threshold, cost * 3.0, 3.0)
            plain.learn(THRESHOLDS.index(threshold), cost)
            assert tuner.threshold == THRESHOLDS[plain.at]
            moves += tuner.threshold != before
    assert moves >= 5


def test_it_starts_at_the_nearest_and_stays_in_range() -> None:
    assert ThresholdTuner(2.2).threshold == 2.0
    assert ThresholdTuner(1e9).threshold == 16.0
    rng, lowest = Random(3), ThresholdTuner(1.0)
    assert {lowest.draw(rng) for _ in range(200)} == {1.0, 1.25}
    lowest.learn(1.0, 5.0, 0.0)  # nothing to compare with, so not counted


@REPLACES_METHODS
def test_a_policy_that_adapts_hears_what_came_of_its_placements() -> None:
    fleet = make_fleet(("p0", Role.PREFILL), ("d0", Role.DECODE))
    policy = KvCacheCentric(KvCacheCentricSettings(adapt=True))
    scheduler, p0 = Scheduler(fleet, policy, Random(5)), member(fleet, "p0")
    heard: list[tuple[float, float]] = []
    assert policy._tuner is not None
    policy._tuner.learn = lambda threshold, seconds, alone_s: heard.append((threshold, seconds))  # type: ignore[method-assign]
    for number in range(40):
        decision = scheduler.schedule(PlacementRequest(f"r{number}", "m", 100, keys(*range(6))), float(number))
        assert decision.trial is not None
        if number % 4:
            fleet.inflight.begin_prefill(f"r{number}", p0, number + 0.125)
        fleet.inflight.end_prefill(f"r{number}", p0, number + 0.25)
    assert [seconds for _, seconds in heard] == [0.25] * 30, "what never began is cheap, and says nothing"
    assert {threshold for threshold, _ in heard} == {1.5, 2.0, 3.0}
    scheduler.use(KvCacheCentric())
    assert scheduler.schedule(PlacementRequest("x", "m", 100), 50.0).trial is None
    fleet.inflight.begin_prefill("x", p0, 50.5)
    fleet.inflight.end_prefill("x", p0, 51.0)
    assert len(heard) == 30


def test_it_is_chosen_by_settings_and_by_model() -> None:
    choice = PLACEMENT_POLICIES.checked("least_loaded;m=kvcache_centric:adapt=true")
    fleet = make_fleet(("p0", Role.PREFILL), ("d0", Role.DECODE))
    scheduler = Scheduler(fleet, PLACEMENT_POLICIES.make(choice))
    assert scheduler.schedule(PlacementRequest("r", "m", 100), 0.0).trial is not None
    fleet.inflight.end_prefill("r", member(fleet, "p0"), 1.0)
