"""The fits that the workload-aware policy learns, and its use of them."""

from __future__ import annotations

import math
import random

import pytest

from pinyon.eviction import EVICTION_POLICIES, Traits
from pinyon.eviction.fit import PRIOR, Fit
from pinyon.eviction.workload_aware import CATEGORIES_MAX, TURNS_MAX, WorkloadAware, WorkloadAwareSettings

CHAT, FILE = Traits("chat/1"), Traits("file/1")


def learn(policy: WorkloadAware[int], now_s: float) -> None:
    work = policy.refit(now_s)
    assert work is not None
    policy.adopt(work())


def test_the_mass_is_that_of_the_exponential() -> None:
    fit = Fit(0.8, 20.0)
    assert fit.mass(0.0, math.inf) == pytest.approx(0.8)
    steps = [fit.mass(at / 10, 0.1) for at in range(300, 900)]
    assert fit.mass(30.0, 60.0) == pytest.approx(sum(steps))
    assert fit.mass(1e9, 60.0) == 0.0
    masses = [fit.mass(age, 60.0) for age in range(50)]
    assert masses == sorted(masses, reverse=True)


def test_fits_are_those_of_what_came_again() -> None:
    """The fits match two categories of known distributions, whether blocks came again while held or after eviction."""
    random_ = random.Random(5)
    policy: WorkloadAware[int] = WorkloadAware(WorkloadAwareSettings(window_s=1e9))
    truth = {CHAT: (0.7, 5.0), FILE: (0.2, 90.0)}
    events: list[tuple[float, int, Traits]] = []
    for number in range(12_000):
        traits = random_.choice([CHAT, FILE])
        at = random_.uniform(0, 5_000)
        events.append((at, number, traits))
        share, mean_s = truth[traits]
        # At each use the block is used once more with the same probability.
        while random_.random() < share:
            at += random_.expovariate(1 / mean_s)
            events.append((at, number, traits))
    held: set[int] = set()
    for at, number, traits in sorted(events, key=lambda event: event[0]):
        if number in held:
            policy.used([number], at, traits, [0])
        else:
            policy.stored([number], at, traits, [0])
            held.add(number)
        if len(held) > 4_000:
            held.difference_update(policy.victims(1, at))
    learn(policy, 6_000.0)
    for traits, (share, mean_s) in truth.items():
        fit = policy.fits[traits.category]
        assert fit.share == pytest.approx(share, abs=0.03)
        assert fit.mean_s == pytest.approx(mean_s, rel=0.1)
    assert policy.fits["chat/1"].share > policy.fits[""].share > policy.fits["file/1"].share


def test_what_is_old_fades() -> None:
    policy: WorkloadAware[int] = WorkloadAware(WorkloadAwareSettings(window_s=100.0, refit_s=1.0))
    policy.stored(range(1000), 0.0, CHAT, range(1000))
    policy.used(range(1000), 1.0, CHAT, range(1000))
    learn(policy, 2.0)
    assert policy.fits["chat/1"].mean_s == pytest.approx(1.0)
    assert policy.refit(2.5) is None, "not yet"
    learn(policy, 902.0)
    policy.used(range(1000), 1001.0, CHAT, range(1000))
    learn(policy, 1002.0)
    assert policy.fits["chat/1"].mean_s == pytest.approx(1000.0, rel=0.01)
    learn(policy, 9000.0)
    assert policy.fits == {"": PRIOR}, "nothing was seen for long"


def test_a_category_that_comes_again_outlives_one_that_does_not() -> None:
    """LRU would evict the older block (paper, 4.1)."""
    for choice, victim in (("workload_aware", 2), ("workload_aware:fitted=false", 1), ("lru", 1)):
        policy = EVICTION_POLICIES.make(choice)
        policy.stored([1], 0.0, CHAT, [0])
        policy.stored([2], 5.0, FILE, [0])
        if isinstance(policy, WorkloadAware):
            assert (policy.refit(6.0) is None) is ("fitted" in choice)
            if "fitted" not in choice:
                policy.adopt({"": PRIOR, "chat/1": Fit(0.8, 60.0), "file/1": Fit(0.1, 60.0)})
        assert policy.victims(1, 10.0) == [victim], choice


def test_life_bounds_what_long_tails_are_worth() -> None:
    """The blocks that come again after a very long time are worth most without a life (paper, 4.2)."""
    fits = {"": PRIOR, "chat/1": Fit(0.5, 20.0), "file/1": Fit(0.6, 10_000.0)}
    for choice, victim in (("workload_aware:life_s=10", 2), ("workload_aware:life_s=0", 1)):
        policy = EVICTION_POLICIES.make(choice)
        policy.stored([1], 0.0, CHAT, [0])
        policy.stored([2], 0.0, FILE, [0])
        policy.adopt(fits)  # type: ignore[attr-defined]
        assert policy.victims(1, 5.0) == [victim], choice


def test_clients_cannot_make_categories_without_end() -> None:
    policy: WorkloadAware[int] = WorkloadAware(WorkloadAwareSettings())
    for number in range(3 * CATEGORIES_MAX):
        policy.stored([number], float(number), Traits(f"kind{number}/1"), [0])
    assert len(policy._queues) <= CATEGORIES_MAX + 1
    assert len(policy.victims(3 * CATEGORIES_MAX, 1e4)) == 3 * CATEGORIES_MAX
    assert len(policy._ghosts) <= 2, "as many as are held"


def test_categories_that_nobody_uses_make_room_for_others() -> None:
    """The blocks that are pinned then, or come back, are not lost with their category."""
    policy: WorkloadAware[int] = WorkloadAware(WorkloadAwareSettings(window_s=10.0, refit_s=1.0))
    for number in range(3 * CATEGORIES_MAX):
        policy.stored([number], 0.0, Traits(f"kind{number}/1"), [0])
    learn(policy, 0.0)
    policy.stored([-1], 1.0, CHAT, [0])
    assert policy._held[-1].category == ""
    policy.pinned([0, 1, 2], 1.0)
    gone = policy.victims(3 * CATEGORIES_MAX, 1.0)
    assert len(gone) == 3 * CATEGORIES_MAX - 2
    learn(policy, 100.0)
    assert set(policy._queues) <= {"", "kind0/1", "kind1/1", "kind2/1"}
    policy.dropped([0], 100.0)
    policy.used([1], 100.0, None, [0])
    policy.unpinned([1], 100.0)
    policy.stored([gone[0], -2], 100.0, CHAT, range(2))
    assert policy._held[-2].category == CHAT.category
    assert sorted(policy.victims(9, 101.0)) == sorted([1, gone[0], -2])
    policy.unpinned([2], 102.0)
    assert policy.victims(9, 103.0) == [2]


def test_one_long_conversation_does_not_fill_all_categories() -> None:
    policy: WorkloadAware[int] = WorkloadAware(WorkloadAwareSettings())
    for turn in range(1, 1000):
        policy.stored([turn], float(turn), Traits(f"chat/{turn}"), [turn])
    assert len(policy._queues) == TURNS_MAX + 1


@pytest.mark.parametrize("option", ["life_s=-1", "window_s=0", "refit_s=0", "life_s=nan", "fitted=maybe"])
def test_options_have_bounds(option: str) -> None:
    with pytest.raises(ValueError, match=option.partition("=")[0]):
        EVICTION_POLICIES.make(f"workload_aware:{option}")
