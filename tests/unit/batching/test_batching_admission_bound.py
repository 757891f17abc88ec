"""The slots and room that admission holds back, by hand: shared blocks counted twice, and dynamic batches."""

from __future__ import annotations

import pytest

from pinyon.batching import BATCHING_POLICIES, BatchRequest, BlockNeed, StepSeen
from pinyon_lab.policies.bounded import DoubleCounting
from pinyon_lab.policies.dynamic_batch import BATCH_MAX, STEPS, DynamicBatch, DynamicBatchSettings


class Books:
    """The books of ten blocks: each running request takes its own blocks, and shared blocks are taken once."""

    def __init__(self) -> None:
        self.running: dict[int, BatchRequest] = {}

    @property
    def room(self) -> int:
        own = sum(request.blocks - request.reusable for request in self.running.values())
        return 10 - own - len({key for request in self.running.values() for key in request.block_keys})

    def need(self, request: BatchRequest) -> BlockNeed:
        used = {key for other in self.running.values() for key in other.block_keys}
        held = sum(key in used for key in request.block_keys)
        return BlockNeed(held, request.blocks - held)

    def behind(self, number: int) -> int:
        return sum(request.blocks for other, request in self.running.items() if other > number)


def sharing(number: int, group: bytes = b"a") -> BatchRequest:
    """Returns a request with two blocks of the group and a block of its own."""
    return BatchRequest(number, 40, 3, (group, 2 * group), reusable=2)


@pytest.mark.parametrize(("name", "enter"), [("fcfs", 8), ("sglang_fcfs", 3)])
def test_what_is_shared_counts_for_each(name: str, enter: int) -> None:
    """The ten blocks hold two shared blocks and eight own ones (8 requests), or three blocks for each (3 requests)."""
    books = Books()
    policy = BATCHING_POLICIES.make(name).policy(books)
    for number in range(9):
        policy.enqueue(sharing(number))
    entered = 0
    while chosen := policy.admit(9, books.room, 0.0):
        books.running.update((number, sharing(number)) for number in chosen)
        entered += len(chosen)
    assert entered == enter
    # After one request has ended, there is room for one again.
    del books.running[0]
    policy.remove(0)
    assert len(policy.admit(9, books.room, 1.0)) == 1


def test_what_was_saved_is_known_until_the_last_one_ends() -> None:
    counting = DoubleCounting(Books())
    for number, group in enumerate((b"a", b"a", b"b", b"a")):
        counting.admitted(sharing(number, group))
    assert counting.within(5, 10) == (5, 10 - 4)
    counting.ended(2)
    assert counting.within(5, 10) == (5, 10 - 4)
    counting.ended(0)
    assert counting.within(5, 10) == (5, 10 - 2)
    counting.ended(3)
    counting.ended(1)
    assert counting.within(5, 10) == (5, 10)


@pytest.mark.parametrize("name", ["sglang_fcfs", "dynamic"])
def test_those_that_another_policy_admitted_count_too(name: str) -> None:
    """A request that another policy admitted takes its blocks too: 7 of 10 are left.

    By own blocks, each request takes one of the 7, and one block is left to the running request. By all blocks, three
    requests of three blocks fit into ten."""
    books = Books()
    policy = BATCHING_POLICIES.make(name).policy(books)
    books.running[0] = sharing(0)
    policy.adopt(sharing(0), 0.0)
    for number in range(1, 9):
        policy.enqueue(sharing(number))
    entered = []
    while chosen := policy.admit(9, books.room, 0.0):
        books.running.update((number, sharing(number)) for number in chosen)
        entered += chosen
    assert entered == ([1, 2] if name == "sglang_fcfs" else [1, 2, 3, 4, 5, 6])
    for number in (0, *entered):
        assert policy.remove(number)
    assert policy.running == 0


def steps(batch: DynamicBatch, decoded: int, seconds: float, count: int = STEPS) -> int:
    for _ in range(count):
        batch.observe(StepSeen(decoded, 0, seconds))
    return batch.limit


def running(batch: DynamicBatch, count: int) -> None:
    for number in range(count):
        batch.admitted(BatchRequest(number, 10, 1))


def test_a_step_that_takes_too_long_makes_the_batch_smaller() -> None:
    """The batch shrinks to 40 · 0.1 / 0.125 = 32, and to no less than half at once."""
    assert steps(DynamicBatch(DynamicBatchSettings(0.1)), 40, 0.125) == 32
    assert steps(DynamicBatch(DynamicBatchSettings(0.1)), 40, 1.0) == 20
    assert steps(DynamicBatch(DynamicBatchSettings(0.1)), 1, 1.0) == 1


def test_some_steps_are_looked_at_together_however_they_are_told() -> None:
    batch = DynamicBatch(DynamicBatchSettings(0.1))
    assert steps(batch, 40, 0.2, STEPS - 1) == BATCH_MAX
    assert steps(batch, 0, 9.0, 5) == BATCH_MAX, "nobody waited for a token"
    assert steps(batch, 40, 0.2, 1) == 20
    batch = DynamicBatch(DynamicBatchSettings(0.1))
    batch.observe(StepSeen(40 * STEPS, 0, 0.2 * STEPS, STEPS))
    assert batch.limit == 20


def test_the_batch_grows_while_full_with_clearly_shorter_steps() -> None:
    batch = DynamicBatch(DynamicBatchSettings(0.1))
    assert steps(batch, 40, 0.125) == 32
    assert steps(batch, 32, 0.095) == 32, "close to the target"
    assert steps(batch, 20, 0.05) == 32, "not reached"
    assert steps(batch, 32, 0.08) == 36
    assert steps(batch, 36, 0.08) == 40


def test_those_that_run_have_a_block_each_left_to_them() -> None:
    batch = DynamicBatch(DynamicBatchSettings())
    assert batch.within(9, 10) == (9, 10)
    running(batch, 4)
    batch.admitted(BatchRequest(4, 10, 1, decodes=False))
    assert batch.within(9, 10) == (9, 6)
    batch.ended(4)
    batch.ended(0)
    assert batch.within(9, 10) == (9, 7)


def test_nobody_enters_beyond_the_limit() -> None:
    policy = BATCHING_POLICIES.make("dynamic:tbt_s=0.1").policy(Books())
    for number in range(6):
        policy.enqueue(BatchRequest(number, 10, 1))
    assert policy.admit(4, 99, 0.0) == [0, 1, 2, 3]
    for _ in range(STEPS):
        policy.observe(StepSeen(4, 0, 0.2))
    assert policy.admit(9, 99, 1.0) == []
    for number in range(3):
        policy.remove(number)
    assert policy.admit(9, 99, 1.0) == [4]


@pytest.mark.parametrize("tbt_s", [0.0, -1.0, 61.0])
def test_bounds(tbt_s: float) -> None:
    with pytest.raises(ValueError, match="tbt_s"):
        DynamicBatchSettings(tbt_s)
