"""Plans over numbers, and for whom a step counts."""

from __future__ import annotations

import pytest

from pinyon.batching import PromptWork, StepLimits, StepPlan, StepScheduler


@pytest.fixture
def scheduler() -> StepScheduler:
    return StepScheduler(StepLimits(max_batch=2, step_tokens=20, chunk_tokens=16, block_tokens=8))


def decided(scheduler: StepScheduler) -> StepPlan | None:
    scheduler.fill()
    assert not scheduler.growth()
    return scheduler.decide(0.0)


def test_decodes_come_first_and_prompts_share_what_is_left(scheduler):
    for number in range(3):
        scheduler.add_decode(number, 5, 2)
    scheduler.add_prefill(PromptWork(0, 3, 40))
    scheduler.add_prefill(PromptWork(1, 0, 40))
    plan = decided(scheduler)
    assert plan == StepPlan([(0, 3, 16), (1, 0, 5)], [0, 1])
    assert plan.tokens == 20
    assert (scheduler.running, scheduler.waiting, scheduler.prefilling) == (2, 1, 2)
    assert scheduler.fold(plan) == plan
    scheduler.remove_decode(0)
    assert decided(scheduler) == StepPlan([(0, 16, 32), (1, 5, 7)], [1, 2])


def test_a_prompt_is_gone_when_its_last_chunk_counts(scheduler):
    scheduler.add_prefill(PromptWork(0, 0, 20))
    plans = []
    while (plan := decided(scheduler)) is not None:
        plans += plan.prefills
        scheduler.fold(plan)
    assert plans == [(0, 0, 16), (0, 16, 20)]
    assert scheduler.prefilling == 0


def test_a_step_counts_only_for_those_that_stayed_and_did_not_fail(scheduler):
    for number in range(2):
        scheduler.add_decode(number, 5, 2)
        scheduler.add_prefill(PromptWork(number, 0, 8))
    scheduler.add_prefill(PromptWork(2, 0, 8))
    plan = decided(scheduler)
    scheduler.remove_decode(0)
    scheduler.remove_prefill(0)
    assert scheduler.fold(plan, failed_prefills=[1], failed_decodes=[1]) == StepPlan([(2, 0, 2)], [])
    assert (scheduler.running, scheduler.prefilling) == (0, 1)


def test_a_prompt_that_came_back_during_the_step_is_another_one(scheduler):
    scheduler.add_prefill(PromptWork(0, 0, 40))
    plan = decided(scheduler)
    scheduler.remove_prefill(0)
    scheduler.add_prefill(PromptWork(0, 0, 40))
    assert scheduler.fold(plan) == StepPlan([], [])
    assert decided(scheduler) == plan


def test_misuse_is_refused(scheduler):
    scheduler.add_prefill(PromptWork(0, 0, 8))
    scheduler.add_decode(0, 5, 2)
    with pytest.raises(ValueError, match="prompt 0"):
        scheduler.add_prefill(PromptWork(0, 0, 8))
    with pytest.raises(ValueError, match="nothing to compute"):
        scheduler.add_prefill(PromptWork(1, 8, 8))
    with pytest.raises(ValueError, match="request 0"):
        scheduler.add_decode(0, 5, 2)
    scheduler.remove_prefill(7)
    scheduler.remove_decode(7)
    assert decided(scheduler) == StepPlan([(0, 0, 8)], [0])


def test_a_request_needs_a_block_more_when_its_own_are_full(scheduler):
    scheduler.add_decode(7, tokens=15, blocks=2)
    scheduler.add_decode(8, tokens=5, blocks=1)
    scheduler.fill()
    needed = []
    for _ in range(12):
        for number in scheduler.growth():
            needed.append(number)
            scheduler.grown(number, 1)
        scheduler.fold(decided(scheduler))
    # The tokens at positions 16 and 24, and 8 and 16.
    assert needed == [7, 8, 7, 8]
