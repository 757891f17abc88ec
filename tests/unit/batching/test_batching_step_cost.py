"""Tests that the cost of chunks is learned from steps, and that a step that decodes stays within its limit."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from pinyon.batching import PromptWork, StepLimits, StepPlan, StepScheduler, StepSeen
from pinyon.batching.step_cost import PROMPT_SHARE, StepCost
from pinyon.profiles.engine_profile import EngineProfile
from pinyon_lab.policies.group_rounds import GroupRounds

BLOCK = 16
TBT_S = 0.1
ENGINE = EngineProfile("s", "", "", 1e-3, 1e-4, 2e-8, 9e-3, 2e-4, 0.0)


class Played:
    """A scheduler whose steps take as long as the profile says; ``longest_s`` is the longest time between tokens."""

    def __init__(self, decodes: int, tbt_s: float = TBT_S, engine: EngineProfile = ENGINE) -> None:
        self.scheduler = StepScheduler(StepLimits(256, 2048, 2048, BLOCK, tbt_s))
        self._engine = engine
        for number in range(decodes):
            self.scheduler.add_decode(number, 1, 1 << 20)
        self.longest_s = 0.0

    def step(self) -> StepPlan:
        self.scheduler.fill()
        plan = self.scheduler.decide(0.0)
        assert plan is not None
        seconds = self._engine.seconds([(start, end) for _, start, end in plan.prefills], len(plan.decodes), 0)
        assert self.scheduler.fold(plan) == plan
        self.scheduler.observe(StepSeen(len(plan.decodes), plan.prompt_tokens, seconds))
        if plan.decodes:
            self.longest_s = max(self.longest_s, seconds)
        return plan

    def taught(self) -> Played:
        """Lets the scheduler learn the costs of decoding and of a prompt of some length."""
        for _ in range(8):
            self.step()
        self.scheduler.add_prefill(PromptWork(1000, 0, 4000))
        while self.scheduler.prefilling:
            self.step()
        self.longest_s = 0.0
        return self


@pytest.mark.parametrize("decodes", [1, 8, 32, 200])
def test_a_long_prompt_that_joins_is_no_spike(decodes: int) -> None:
    """A prompt of 8,000 tokens is a spike on the same engine without the limit."""
    for tbt_s, longest_s in ((0.0, 0.25), (TBT_S, TBT_S)):
        played = Played(decodes, tbt_s).taught()
        played.scheduler.add_prefill(PromptWork(0, 0, 8000))
        while played.scheduler.prefilling:
            plan = played.step()
            assert len(plan.decodes) == decodes, "all are decoded in every step"
            assert plan.prefills, "and the prompt advances"
        if tbt_s:
            assert played.longest_s < 1.03 * longest_s
            assert played.scheduler.cut_steps
        else:
            assert played.longest_s > longest_s
            assert not played.scheduler.cut_steps


def test_nothing_is_known_at_first_and_a_block_shows_it() -> None:
    played = Played(8)
    played.scheduler.add_prefill(PromptWork(0, 0, 8000))
    assert played.step().prompt_tokens == BLOCK
    assert played.step().prompt_tokens > 4 * BLOCK


def test_where_nobody_runs_nothing_is_cut() -> None:
    played = Played(0)
    played.scheduler.add_prefill(PromptWork(0, 0, 8000))
    assert played.step().prompt_tokens == 2048
    assert played.step().prompt_tokens == 2048
    assert not played.scheduler.cut_steps


def test_under_a_stream_of_long_prompts_both_sides_get_on() -> None:
    """Running requests keep their bound and prompts advance in each step, although more come than can be computed."""
    played = Played(32).taught()
    came = ended = 0
    for step in range(400):
        if step % 5 == 0:
            played.scheduler.add_prefill(PromptWork(came, 0, 3000 + 500 * (came % 7)))
            came += 1
        before = played.scheduler.prefilling
        plan = played.step()
        assert len(plan.decodes) == 32
        ended += before - played.scheduler.prefilling
        assert plan.prompt_tokens > 15 * BLOCK
    assert played.longest_s < 1.05 * TBT_S
    assert ended > 20
    assert played.scheduler.prefilling > 20


def test_a_batch_that_uses_up_the_limit_leaves_prompts_a_share() -> None:
    """The share is a part of decoding's time, or one block where a block takes longer."""
    decodes = 600
    played = Played(1)
    for number in range(1, decodes):
        played.scheduler.add_decode(number, 1, 1 << 20)
    played.scheduler._limits = StepLimits(1024, 4096, 4096, BLOCK, TBT_S)
    played.taught()
    decode_s = ENGINE.seconds((), decodes, 0)
    assert decode_s > 1.2 * TBT_S
    played.scheduler.add_prefill(PromptWork(0, 0, 2000))
    while played.scheduler.prefilling:
        assert played.step().prompt_tokens >= BLOCK
    assert played.longest_s == pytest.approx((1 + PROMPT_SHARE) * decode_s, rel=0.03)


def test_a_block_slower_than_the_limit_is_computed_all_the_same() -> None:
    slow = EngineProfile("s", "", "", 0.0, 0.05, 0.0, 9e-3, 2e-4, 0.0)
    played = Played(4, engine=slow)
    played.scheduler.add_prefill(PromptWork(0, 0, 10 * BLOCK))
    played.scheduler.add_prefill(PromptWork(1, 0, 10 * BLOCK))
    for start in range(0, 10 * BLOCK, BLOCK):
        assert played.step().prefills == [(0, start, start + BLOCK)]


def test_each_batch_of_a_round_has_its_part_of_the_limit() -> None:
    """The round has two groups: the time between a request's tokens is that of two steps."""
    scheduler = StepScheduler(StepLimits(64, 2048, 2048, BLOCK, TBT_S), rounds=GroupRounds(1))
    for number in range(8):
        scheduler.add_decode(number, BLOCK, 1 << 20, [number % 2])
    scheduler.add_prefill(PromptWork(0, 0, 20000))
    lasted: list[float] = []
    for _ in range(20):
        scheduler.fill()
        plan = scheduler.decide(0.0)
        assert plan is not None
        assert len(plan.decodes) == 4
        lasted.append(ENGINE.seconds([(start, end) for _, start, end in plan.prefills], 4, 0))
        scheduler.fold(plan)
        scheduler.observe(StepSeen(4, plan.prompt_tokens, lasted[-1]))
    assert all(a + b < 1.1 * TBT_S for a, b in pairwise(lasted[2:]))
    assert lasted[-1] > 0.4 * TBT_S


def test_steps_told_together_teach_the_same_as_one_by_one() -> None:
    for known in (False, True):
        together, alone = StepCost(), StepCost()
        for cost in (together, alone):
            if known:
                cost.saw([], StepSeen(4, 0, 0.5))
        steps, first_s, growth_s = 37, 0.02, 3e-4
        total_s = steps * first_s + growth_s * steps * (steps - 1) / 2
        together.saw([], StepSeen(4 * steps, 0, total_s, steps, growth_s))
        for step in range(steps):
            alone.saw([], StepSeen(4, 0, first_s + growth_s * step))
        assert together.decode_s == pytest.approx(alone.decode_s, rel=1e-12)


def test_an_engine_that_says_what_decoding_takes_is_believed() -> None:
    """The batch doubles while every step has prompts, so that decoding alone is never seen."""
    cost = StepCost()
    for decoded in (8, 16):
        for _ in range(12):
            decode_s, prompt_s = 0.001 * decoded, 0.1
            cost.saw([(0, 100)], StepSeen(decoded, 100, decode_s + prompt_s, decode_s=decode_s))
        assert cost.decode_s == pytest.approx(decode_s, rel=0.05)
        assert cost.line()[0] * 100 == pytest.approx(prompt_s)


def test_what_a_token_costs_is_a_line_over_what_is_before_it() -> None:
    cost = StepCost()
    cost.saw([], StepSeen(8, 0, 0.02))
    for start in (0, 1000, 5000):
        chunks = [(start, start + 100), (2 * start, 2 * start + 50)]
        seconds = sum(1e-4 * (end - begin) + 1e-8 * (end * end - begin * begin) for begin, end in chunks)
        cost.saw(chunks, StepSeen(8, 150, 0.02 + seconds))
    token_s, slope_s = cost.line()
    assert token_s == pytest.approx(1e-4, rel=1e-6)
    assert slope_s == pytest.approx(2e-8, rel=1e-6)
    left = cost.left(0.1)
    tokens = left.tokens(3000, 1 << 20)
    assert left.cut
    took_s = 1e-4 * tokens + 1e-8 * ((3000 + tokens) ** 2 - 3000**2)
    assert took_s == pytest.approx(0.08, rel=0.01)


def test_odd_times_break_nothing() -> None:
    """The times are zero, less than decoding alone, or shorter for deeper chunks."""
    cost = StepCost()
    cost.saw([], StepSeen(8, 0, 0.02))
    for start, seconds in ((0, 0.05), (1000, 0.01), (2000, 0.0), (10000, 0.03)):
        cost.saw([(start, start + 100)], StepSeen(8, 100, seconds))
        token_s, slope_s = cost.line()
        assert token_s >= 0
        assert slope_s >= 0
        assert 0 <= cost.left(0.1).tokens(0, 100) <= 100
    free = StepCost()
    free.saw([(0, 10)], StepSeen(0, 10, 0.0))
    assert free.left(0.1).tokens(0, 100) == 100


def test_one_stalled_step_is_not_taken_for_the_cost_of_chunks() -> None:
    cost = StepCost()
    for place in range(40):
        start = 256 * (place % 8)
        cost.saw([(start, start + 256)], StepSeen(0, 256, ENGINE.seconds([(start, start + 256)], 0, 0)))
    known = cost.line()
    cost.saw([(0, 256)], StepSeen(0, 256, 5.0))
    assert cost.line() == known
    for _ in range(30):
        cost.saw([(0, 256)], StepSeen(0, 256, 5.0))
    assert cost.line()[0] > 100 * known[0], "an engine that has become slow is learned"
    for _ in range(200):
        cost.saw([(0, 256)], StepSeen(0, 256, 0.03))
    assert cost.line()[0] == pytest.approx(0.03 / 256, rel=0.5)


@pytest.mark.parametrize("every", [2, 16, 31, 50])
def test_deep_chunks_among_shallow_ones_are_learned(every: int) -> None:
    """Each deep chunk differs from the shallow chunks before it, however rare it is."""
    deep = replace(ENGINE, prefill_pair_s=2e-6)
    cost = StepCost()
    for place in range(10 * every + 1):
        chunk = (16_000, 16_064) if place % every == 0 and place > every else (0, 64)
        cost.saw([chunk], StepSeen(0, 64, deep.seconds([chunk], 0, 0)))
    start_s, slope_s = cost.line()
    assert (start_s + slope_s * 16_032) * 64 == pytest.approx(deep.seconds([(16_000, 16_064)], 0, 0), rel=0.2)
