"""Step plans and the use of their results, without an engine."""

from __future__ import annotations

import numpy as np
import pytest

from pinyon.batching import BatchRequest, DecodeSlot, Fcfs, PromptWork, StepLimits, StepScheduler
from pinyon.batching.fcfs import PATIENCE_S
from pinyon.core.layout import KvLayout
from pinyon.core.orders import PrefillOrder
from pinyon.core.request import RequestClass, SamplingParams
from pinyon.decisions import Admission
from pinyon.eviction import Lru
from pinyon.paging import BlockPool, LeaseTable, Reservations
from services.worker.instance.step_members import DecodeMember, PrefillMember, StepMembers, StepOutcome
from tests.unit.worker.caches import Holder, new_cache

LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=1, block_tokens=8)
LIMITS = StepLimits(max_batch=2, step_tokens=20, chunk_tokens=16, block_tokens=8)


class Log:
    def __init__(self, last: int = 10**9) -> None:
        self.chunks, self.tokens, self.errors = [], [], []
        self.ways = 0
        self.seconds: list[float] = []
        self._last = last

    def chunk(self, start, end, token, seconds):
        self.chunks.append((start, end, token))
        self.seconds.append(seconds)

    def token(self, token):
        self.tokens.append(token)
        return len(self.tokens) < self._last

    def error(self, error):
        self.errors.append(error)

    def gave_way(self):
        self.ways += 1


def prefill(number: int, length: int, log: Log, position: int = 0) -> PrefillMember:
    tokens = np.arange(length, dtype=np.uint32)
    order = PrefillOrder("", RequestClass(), tokens, [], SamplingParams(), 0, (), False, "")
    return PrefillMember(PromptWork(number, position, length), order, list(range(99)), log.chunk, log.error)


def decode(number: int, log: Log, table: list[int] | None = None) -> DecodeMember:
    table = table or [number]
    slot = DecodeSlot(7, 5, table, SamplingParams(), 1)
    return DecodeMember(number, slot, table, log.token, log.error, log.gave_way)


def new_members(scheduler: StepScheduler, room: Pool | None = None) -> StepMembers:
    pool = BlockPool(1, Lru())
    admission = Admission(Fcfs, pool, Reservations(pool, LeaseTable()), slots=1, headroom=0)  # no request waits in it
    return StepMembers(scheduler, admission, room or Pool())


class Pool:
    """A pool with a number of free blocks."""

    def __init__(self, blocks: int = 99) -> None:
        self.free = blocks
        self.ended: list[int] = []
        self.settled = 0

    def grow(self, number: int, count: int) -> list[int] | None:
        if self.free < count:
            return None
        self.free -= count
        return [100 + self.free] * count

    def give_way(self, number: int, table: list[int]) -> None:
        self.ended.append(number)
        self.free += len(table)

    def settle(self) -> None:
        self.settled += 1

    def swapping(self, tables: object) -> None:
        return None


@pytest.fixture
def scheduler() -> StepScheduler:
    return StepScheduler(LIMITS)


@pytest.fixture
def members(scheduler) -> StepMembers:
    return new_members(scheduler)


@pytest.fixture
def log() -> Log:
    return Log()


def result(step, token=50):
    """Returns the engine's answer to a step: the last chunks and all decodes sample ``token``."""
    prefills = [token if chunk.sampling is not None else None for chunk in step.chunks]
    return StepOutcome(prefills, [token] * len(step.slots), 1.0)


def stepped(members: StepMembers) -> None:
    step = members.decide(0.0)
    members.fold(step, result(step))


@pytest.mark.parametrize(("prefills", "decodes"), [([], [50, 50]), ([None], [50]), ([None, None], [50, 50]), ([], [])])
def test_results_of_nobody_knows_whom_fail_all(members, prefills, decodes, log):
    members.add_prefill(prefill(1, 10, log))
    for number in (2, 3):
        members.add_decode(decode(number, log))
    step = members.decide(0.0)
    assert members.fold(step, StepOutcome(prefills, decodes, 1.0)) == 0
    assert (len(log.errors), log.tokens, log.chunks) == (3, [], [])
    assert members.decide(0.0) is None


def test_nothing_to_do_is_no_step(members):
    assert members.decide(0.0) is None


def test_decodes_come_first_and_chunks_share_the_budgets_rest(members, scheduler, log):
    for number in range(3):
        members.add_decode(decode(number, log))
    members.add_prefill(prefill(1, 40, log))
    members.add_prefill(prefill(2, 40, log))
    step = members.decide(0.0)
    assert step.plan.decodes == [0, 1]  # max_batch
    assert [len(chunk.tokens) for chunk in step.chunks] == [16, 2]
    assert (scheduler.running, scheduler.waiting, scheduler.prefilling) == (2, 1, 2)


def test_a_full_batch_does_not_starve_prompts():
    limits = StepLimits(max_batch=30, step_tokens=4, chunk_tokens=16, block_tokens=8)
    members = new_members(StepScheduler(limits))
    log = Log()
    for number in range(30):
        members.add_decode(decode(number, log))
    members.add_prefill(prefill(1, 40, log))
    step = members.decide(0.0)
    assert len(step.slots) == 30
    assert [len(chunk.tokens) for chunk in step.chunks] == [8]


def test_a_prompt_goes_chunk_by_chunk_and_samples_with_the_last(members, log):
    members.add_prefill(prefill(1, 40, log, position=3))
    starts = []
    while (step := members.decide(0.0)) is not None:
        starts += [(chunk.start, chunk.sampling is not None) for chunk in step.chunks]
        members.fold(step, result(step))
    assert starts == [(3, False), (16, False), (32, True)]
    assert log.chunks == [(3, 16, None), (16, 32, None), (32, 40, 50)]


def test_tokens_feed_the_next_step_until_the_request_is_done(members, scheduler):
    log = Log(last=3)
    work = decode(1, log)
    members.add_decode(work)
    slots = []
    token = 50
    while (step := members.decide(0.0)) is not None:
        slots += [(slot.token, slot.position, slot.sample_index) for slot in step.slots]
        assert members.fold(step, result(step, token)) == 1
        token += 1
    assert slots == [(7, 5, 1), (50, 6, 2), (51, 7, 3)]
    assert log.tokens == [50, 51, 52]
    assert scheduler.running == 0


def test_a_prompts_time_is_its_steps_despite_decodes_beside_it(members):
    alone, shared = Log(), Log()
    members.add_decode(decode(1, Log()))
    members.add_prefill(prefill(1, 16, alone))
    stepped(members)
    assert alone.seconds == [1.0]
    members.add_prefill(prefill(2, 12, shared))
    members.add_prefill(prefill(3, 4, shared))
    stepped(members)
    assert shared.seconds == [0.75, 0.25]


def test_results_of_what_was_removed_during_the_step_are_dropped(members, log):
    chunk, slot = prefill(1, 40, log), decode(1, log)
    members.add_prefill(chunk)
    members.add_decode(slot)
    step = members.decide(0.0)
    members.remove_prefill(chunk)
    members.remove_decode(slot)
    assert members.fold(step, result(step)) == 0
    assert (log.chunks, log.tokens, log.errors) == ([], [], [])
    assert members.decide(0.0) is None


def test_only_the_guilty_get_the_error(members, scheduler):
    good, bad = Log(), Log()
    members.add_prefill(prefill(1, 8, bad))
    members.add_prefill(prefill(2, 8, good))
    members.add_decode(decode(1, bad))
    members.add_decode(decode(2, good))
    step = members.decide(0.0)
    error = RuntimeError("no")
    members.fold(step, StepOutcome([error, 50], [error, 51], 1.0))
    assert bad.errors == [error, error]
    assert (good.chunks, good.tokens) == ([(0, 8, 50)], [51])
    assert (scheduler.running, scheduler.prefilling) == (1, 0)


def test_a_failing_callback_costs_the_other_members_nothing(members, scheduler):
    good, bad = Log(), Log()
    broken = decode(1, bad)
    broken.advanced = lambda token: 1 / 0
    members.add_decode(broken)
    members.add_decode(decode(2, good))
    stepped(members)
    assert [type(error) for error in bad.errors] == [ZeroDivisionError]
    assert good.tokens == [50]
    assert scheduler.running == 1


def test_a_table_grows_before_the_token_that_needs_it(members, log):
    work = decode(1, log)
    members.add_decode(work)
    sizes = []
    for _ in range(14):
        step = members.decide(0.0)
        sizes.append(len(step.slots[0].block_table))
        members.fold(step, result(step))
    assert sizes == [1] * 3 + [2] * 8 + [3] * 3
    assert log.ways == 0


def test_without_room_the_latest_gives_way_and_the_first_goes_on(scheduler):
    room = Pool(0)
    members = new_members(scheduler, room)
    old, young = Log(), Log()
    for number, log in ((1, old), (2, young)):
        members.add_decode(decode(number, log))
    for _ in range(4):
        stepped(members)
    assert (old.ways, young.ways) == (0, 1)
    assert (len(old.tokens), len(young.tokens)) == (4, 3)
    assert (room.ended, room.settled, members.preemptions) == ([2], 5, 1), "settled once a step, and once more"
    assert members.running == 1


def test_a_failure_in_giving_way_costs_the_others_nothing(scheduler):
    members = new_members(scheduler, Pool(0))
    old, young = Log(), Log()
    members.add_decode(decode(1, old))
    broken = decode(2, young)
    broken.preempted = lambda: 1 / 0
    members.add_decode(broken)
    for _ in range(4):
        stepped(members)
    assert [type(error) for error in young.errors] == [ZeroDivisionError]
    assert len(old.tokens) == 4


async def test_later_requests_give_way_though_nothing_is_released(scheduler):
    now = [0.0]
    cache = new_cache(LAYOUT, 6, lambda: now[0])
    members = StepMembers(scheduler, cache.admission, cache)
    first, late, young = (Holder(cache, [], 2), Holder(cache, [], 2), Holder(cache, [], 2))
    log = Log()
    cache.give_way(late.number, late.table)
    late.future = cache.reserve(BatchRequest(late.number, 1, 4), at_once=False)
    members.add_decode(decode(young.number, log, young.table))
    for now[0] in (0.0, PATIENCE_S / 2, PATIENCE_S):
        assert log.ways == 0
        step = members.decide(now[0])
        if step is not None:
            members.fold(step, result(step))
    assert log.ways == 1, "a younger one kept the room for as long as it liked"
    assert not late.waits
    late.end()
    first.end()
