"""Plans and what becomes of results, without an engine."""

from __future__ import annotations

import numpy as np
import pytest

from pinyon.batching import BatchRequest, Fcfs
from pinyon.batching.step import DecodeWork, PrefillWork, StepLimits, StepOutcome, StepScheduler
from pinyon.core.request import SamplingParams

LIMITS = StepLimits(max_batch=2, step_tokens=20, chunk_tokens=16, block_tokens=8)


class Log:
    """What the members were told."""

    def __init__(self, last: int = 10**9) -> None:
        self.chunks, self.tokens, self.errors = [], [], []
        self._last = last

    def chunk(self, start, end, token, seconds):
        self.chunks.append((start, end, token))

    def token(self, token):
        self.tokens.append(token)
        return len(self.tokens) < self._last

    def error(self, error):
        self.errors.append(error)


def prefill(length: int, log: Log, position: int = 0) -> PrefillWork:
    tokens = np.arange(length, dtype=np.uint32)
    return PrefillWork(tokens, position, list(range(99)), SamplingParams(), 0, log.chunk, log.error)


def decode(number: int, log: Log) -> DecodeWork:
    return DecodeWork(BatchRequest(number, 5, 9), 7, 5, [0], SamplingParams(), 1, log.token, log.error)


@pytest.fixture
def scheduler() -> StepScheduler:
    return StepScheduler(Fcfs(), LIMITS)


def result(plan, token=50):
    """The engine's answer to a plan: the last chunks and all decodes sample ``token``."""
    prefills = [token if chunk.sampling is not None else None for chunk in plan.chunks]
    return StepOutcome(prefills, [token] * len(plan.slots), 1.0)


def test_nothing_to_do_is_no_step(scheduler):
    assert scheduler.decide(0.0) is None


def test_decodes_come_first_and_chunks_share_what_is_left_of_the_budget(scheduler):
    log = Log()
    for number in range(3):
        scheduler.add_decode(decode(number, log))
    scheduler.add_prefill(prefill(40, log))
    scheduler.add_prefill(prefill(40, log))
    plan = scheduler.decide(0.0)
    assert [work.request.number for work in plan.decodes] == [0, 1]  # max_batch
    assert [len(chunk.tokens) for chunk in plan.chunks] == [16, 2]
    assert (scheduler.running, scheduler.waiting, scheduler.prefilling) == (2, 1, 2)


def test_a_full_batch_does_not_starve_prompts():
    scheduler = StepScheduler(Fcfs(), StepLimits(max_batch=30, step_tokens=4, chunk_tokens=16, block_tokens=8))
    log = Log()
    for number in range(30):
        scheduler.add_decode(decode(number, log))
    scheduler.add_prefill(prefill(40, log))
    plan = scheduler.decide(0.0)
    assert len(plan.slots) == 30
    assert [len(chunk.tokens) for chunk in plan.chunks] == [8]


def test_a_prompt_goes_chunk_by_chunk_and_samples_with_the_last(scheduler):
    log = Log()
    scheduler.add_prefill(prefill(40, log, position=3))
    starts = []
    while (plan := scheduler.decide(0.0)) is not None:
        starts += [(chunk.start, chunk.sampling is not None) for chunk in plan.chunks]
        scheduler.fold(plan, result(plan))
    assert starts == [(3, False), (16, False), (32, True)]
    assert log.chunks == [(3, 16, None), (16, 32, None), (32, 40, 50)]


def test_tokens_feed_the_next_step_until_the_request_says_it_is_finished(scheduler):
    log = Log(last=3)
    work = decode(1, log)
    scheduler.add_decode(work)
    slots = []
    token = 50
    while (plan := scheduler.decide(0.0)) is not None:
        slots += [(slot.token, slot.position, slot.sample_index) for slot in plan.slots]
        assert scheduler.fold(plan, result(plan, token)) == 1
        token += 1
    assert slots == [(7, 5, 1), (50, 6, 2), (51, 7, 3)]
    assert log.tokens == [50, 51, 52]
    assert scheduler.running == 0


def test_results_of_what_was_removed_during_the_step_are_dropped(scheduler):
    log = Log()
    chunk, slot = prefill(40, log), decode(1, log)
    scheduler.add_prefill(chunk)
    scheduler.add_decode(slot)
    plan = scheduler.decide(0.0)
    scheduler.remove_prefill(chunk)
    scheduler.remove_decode(slot)
    assert scheduler.fold(plan, result(plan)) == 0
    assert (log.chunks, log.tokens, log.errors) == ([], [], [])
    assert scheduler.decide(0.0) is None


def test_only_the_guilty_get_the_error(scheduler):
    good, bad = Log(), Log()
    scheduler.add_prefill(prefill(8, bad))
    scheduler.add_prefill(prefill(8, good))
    scheduler.add_decode(decode(1, bad))
    scheduler.add_decode(decode(2, good))
    plan = scheduler.decide(0.0)
    error = RuntimeError("no")
    scheduler.fold(plan, StepOutcome([error, 50], [error, 51], 1.0))
    assert bad.errors == [error, error]
    assert (good.chunks, good.tokens) == ([(0, 8, 50)], [51])
    assert (scheduler.running, scheduler.prefilling) == (1, 0)


def test_a_member_that_breaks_in_its_callback_costs_the_others_nothing(scheduler):
    good, bad = Log(), Log()
    broken = decode(1, bad)
    broken.advanced = lambda token: 1 / 0
    scheduler.add_decode(broken)
    scheduler.add_decode(decode(2, good))
    plan = scheduler.decide(0.0)
    scheduler.fold(plan, result(plan))
    assert [type(error) for error in bad.errors] == [ZeroDivisionError]
    assert good.tokens == [50]
    assert scheduler.running == 1
