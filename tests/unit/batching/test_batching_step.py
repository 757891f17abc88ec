"""Step plans over numbers, and the requests for which a step counts."""

from __future__ import annotations

import pytest

from pinyon.batching import BATCHING_POLICIES, PromptWork, StepLimits, StepPlan, StepScheduler
from pinyon.batching.service_order import SERVICE_ORDERS


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


def test_a_step_counts_only_for_requests_that_stayed_and_worked(scheduler):
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


def computed(scheduler: StepScheduler, now_s: float) -> list[tuple[int, int, int]]:
    """Returns the chunks of one step."""
    plan = scheduler.decide(now_s)
    assert plan is not None
    return scheduler.fold(plan).prefills


def ordered(choice: str, chunk_tokens: int = 16) -> StepScheduler:
    return StepScheduler(StepLimits(2, 16, chunk_tokens, 8), SERVICE_ORDERS.make(choice))


@pytest.mark.parametrize("choice", ["most_in_time", "shortest_in_time"])
def test_a_short_later_prompt_goes_ahead_of_a_long_one_under_way(choice):
    scheduler = ordered(choice)
    scheduler.add_prefill(PromptWork(0, 0, 48, 0.0, seconds=6.0, deadline_s=20.0))
    assert computed(scheduler, 0.0) == [(0, 0, 16)]
    scheduler.add_prefill(PromptWork(1, 0, 12, 2.0, seconds=1.5, deadline_s=20.0))
    assert computed(scheduler, 2.0) == [(1, 0, 12), (0, 16, 20)], "what is left of the step is the long one's"
    assert computed(scheduler, 4.0) == [(0, 20, 32)]
    assert computed(scheduler, 6.0) == [(0, 32, 48)]
    assert scheduler.prefilling == 0


@pytest.mark.parametrize("choice", ["most_in_time", "shortest_in_time"])
def test_of_a_prompt_that_is_being_computed_what_is_left_counts(choice):
    scheduler = ordered(choice)
    scheduler.add_prefill(PromptWork(0, 0, 48, 0.0, seconds=6.0, deadline_s=20.0))
    for now_s in (0.0, 2.0):
        computed(scheduler, now_s)
    scheduler.add_prefill(PromptWork(1, 8, 32, 4.0, seconds=3.0, deadline_s=20.0))
    assert computed(scheduler, 4.0) == [(0, 32, 48)], "2 s are left of it, 3 s of the other one"
    assert computed(scheduler, 6.0) == [(1, 8, 24)]


def test_who_would_make_none_late_is_not_left_behind():
    """The long prompt's deadline comes first, and leaves no time to spare."""
    scheduler = ordered("most_in_time")
    scheduler.add_prefill(PromptWork(0, 0, 32, 0.0, seconds=4.0, deadline_s=4.5))
    assert computed(scheduler, 0.0) == [(0, 0, 16)]
    scheduler.add_prefill(PromptWork(1, 0, 8, 2.0, seconds=1.0, deadline_s=6.0))
    assert computed(scheduler, 2.0) == [(0, 16, 32)]
    assert computed(scheduler, 4.0) == [(1, 0, 8)]


def test_as_they_came_where_nobody_says_otherwise():
    scheduler = ordered("fifo")
    scheduler.add_prefill(PromptWork(1, 0, 48, 0.0, seconds=6.0, deadline_s=20.0))
    scheduler.add_prefill(PromptWork(0, 0, 8, 0.0, seconds=1.0, deadline_s=2.0))
    assert [computed(scheduler, now_s) for now_s in (0.0, 2.0, 4.0)] == [[(1, 0, 16)], [(1, 16, 32)], [(1, 32, 48)]]


@pytest.mark.parametrize(
    ("choice", "share"), [("most_in_time:age_s=3,aged_share=0.25", 0.25), ("shortest_in_time:age_s=3", 1)]
)
def test_a_long_prompt_is_not_starved_by_a_stream_of_short_ones(choice, share):
    """A prompt that is late for long has its share of the steps, or all."""
    scheduler = ordered(choice)
    scheduler.add_prefill(PromptWork(0, 0, 160, 0.0, seconds=20.0, deadline_s=5.0))
    began: list[int] = []
    for step in range(100):
        now_s = 2.0 * step
        scheduler.add_prefill(PromptWork(step + 1, 0, 16, now_s, seconds=2.0, deadline_s=now_s + 50.0))
        chunks = computed(scheduler, now_s)
        if chunks[0][0] == 0:
            began.append(step)
    assert len(began) == 10
    assert began[0] == 5, "8 s is not more than 3 s late"
    steps = began[-1] - began[0]
    assert steps == (9 if share == 1 else 9 * (1 + 1 / share))


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


@pytest.mark.parametrize(
    ("batching", "kernels"), [("feather:chunk_blocks=1", ["whole", "grouped"]), ("fcfs", ["grouped"])]
)
def test_only_kernels_that_read_together_read_once(batching, kernels):
    """``plain`` reads for each request alone, as does an engine without a kernel, whatever batches share."""
    found = []
    for kernel in ("", "plain", "whole", "grouped"):
        rounds = BATCHING_POLICIES.make(batching).rounds(kernel)
        scheduler = StepScheduler(StepLimits(4, 64, 16, 8), rounds=rounds, kernel=kernel)
        for number in range(3):
            scheduler.add_decode(number, 32, 8, scheduler.path([0, 1, 2, 3], 32))
        scheduler.fill()
        assert scheduler.decide(0.0).decodes
        if scheduler.reads_once:
            found.append(kernel)
    assert found == kernels
