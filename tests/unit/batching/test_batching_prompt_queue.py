from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from pinyon.batching import Prompt, PromptQueue
from pinyon.batching.prompt_queue import LOOK_AHEAD
from pinyon.batching.service_order import SERVICE_ORDERS, FifoOrder
from pinyon.core.errors import ResourceExhausted
from tests.unit.batching.books import Counting
from tests.worker_integrity import check_prompts

A, B, C, D = (bytes([number]) * 16 for number in range(4))


class Held:
    def __init__(self, *keys: bytes) -> None:
        self.keys = set(keys)
        self.wanted: Counter[bytes] = Counter()

    def match_prefix(self, keys) -> int:
        return next((index for index, key in enumerate(keys) if key not in self.keys), len(keys))

    def want(self, keys) -> int:
        self.wanted.update(keys[: self.match_prefix(keys)])
        return self.match_prefix(keys)

    def unwant(self, keys) -> None:
        self.wanted.subtract(keys)


def prompt(number: int, *keys: bytes, owned: bool = False, shared: bool = True) -> Prompt:
    return Prompt(number, 8 * len(keys) + 1, keys, len(keys) if shared else 0, owned, 0.0, shared)


@pytest.fixture
def held() -> Held:
    return Held()


@pytest.fixture
def queue(held):
    queue = PromptQueue(held, active=2, limit=40)
    yield queue
    check_prompts(queue)


def test_prompts_start_in_order_and_only_into_free_places(queue):
    for number, key in enumerate((A, B, C)):
        queue.add(prompt(number, key), 0.0)
    assert queue.start(0.0) == [0, 1]
    assert queue.start(0.0) == []
    assert (queue.queued, queue.active, queue.foreign, queue.pending_tokens) == (1, 2, 3, 27)
    queue.advanced(0, 8)
    assert queue.pending_tokens == 19
    assert queue.end(0)
    assert not queue.end(0)
    assert queue.start(0.0) == [2]
    assert queue.pending_tokens == 18


def test_a_shared_prefix_is_computed_once_while_others_go_first(queue, held):
    queue.add(prompt(0, A, B), 0.0)
    queue.add(prompt(1, A, C), 0.0)
    queue.add(prompt(2, D), 0.0)
    assert queue.start(0.0) == [0, 2]
    queue.end(2)
    assert queue.start(0.0) == []
    held.keys.add(A)
    queue.published(0, [A])
    assert queue.start(0.0) == [1]


def test_what_is_neither_shared_nor_reused_waits_for_nobody(queue):
    queue.add(prompt(0, A, shared=False), 0.0)
    queue.add(prompt(1, A), 0.0)
    assert queue.start(0.0) == [0, 1]


def test_a_prompt_that_waits_for_room_lets_those_with_room_by(queue):
    queue.add(prompt(0, A), 0.0)
    assert queue.start(0.0) == [0]
    queue.waits_for_room(0)
    queue.add(prompt(1, B), 0.0)
    queue.add(prompt(2, A, owned=True), 0.0)
    queue.add(prompt(3, C, owned=True), 0.0)
    assert queue.start(0.0) == [2, 3]  # 0 gave up its place and what it had claimed
    queue.has_room(0)
    assert queue.start(0.0) == []
    queue.end(2)
    queue.end(3)
    assert queue.start(0.0) == [1]


def test_the_queue_has_an_end_and_looks_ahead_only_so_far(held):
    queue = PromptQueue(held, active=2, limit=LOOK_AHEAD + 2)
    for number in range(LOOK_AHEAD + 1):
        queue.add(prompt(number, A), 0.0)
    with pytest.raises(ValueError, match="prompt 3"):
        queue.add(prompt(3, A), 0.0)
    queue.add(prompt(99, B), 0.0)
    with pytest.raises(ResourceExhausted):
        queue.add(prompt(100, B), 0.0)
    assert queue.start(0.0) == [0]
    assert queue.start(0.0) == []  # 99 is one prompt too far behind
    queue.end(1)
    assert queue.start(0.0) == [99]


def test_blocks_a_queued_prompt_would_reuse_are_spared_for_it(queue, held):
    held.keys = {A, B}
    for number in range(5):
        queue.add(prompt(number, A, B, C), 0.0)
    assert held.wanted == {A: 5, B: 5}
    held.keys.remove(B)
    queue.add(prompt(5, A, B), 0.0)
    queue.add(prompt(6, A, shared=False), 0.0)
    assert held.wanted == {A: 6, B: 5}
    assert queue.start(0.0) == [0, 6], "the others wait for what the first one computes"
    assert held.wanted == {A: 6, B: 5}, "they have no blocks yet"
    queue.reserved(0)
    assert held.wanted == {A: 5, B: 4}
    for number in range(7):
        assert queue.end(number)
    assert not +held.wanted


def test_the_order_of_service_says_who_leaves_first(held):
    """The order applies to prompts that do not wait for another prompt's blocks."""
    queue = PromptQueue(held, active=1, limit=40, order=SERVICE_ORDERS.make("shortest_in_time:age_s=5"))

    def add(number: int, seconds: float, deadline_s: float, key: bytes) -> None:
        queue.add(replace(prompt(number, key), seconds=seconds, deadline_s=deadline_s), 0.0)

    add(1, 3.0, 10.0, A)
    add(2, 1.0, 10.0, B)
    add(3, 2.0, 0.0, C)
    add(4, 0.5, 0.4, D)
    assert queue.start(0.0) == [2]
    queue.end(3)
    add(5, 0.1, 10.0, B)
    check_prompts(queue)
    assert queue.start(1.0) == [], "it is full"
    queue.end(2)
    assert queue.start(1.0) == [5]
    queue.end(5)
    assert queue.start(1.0) == [1]
    queue.end(1)
    assert queue.start(1.0) == [4], "it is late"
    queue.end(4)
    add(6, 0.1, 2.0, A)
    add(7, 0.1, 20.0, B)
    assert queue.start(8.0) == [6], "late for so long that it goes first"
    queue.end(6)
    queue.end(7)
    check_prompts(queue)


@pytest.mark.parametrize("order", SERVICE_ORDERS.names)
def test_a_prompt_with_room_is_found_behind_all_that_must_wait(order):
    """The prompt may hold the room that the others wait for."""
    queue = PromptQueue(Held(), active=4, limit=4 * LOOK_AHEAD, order=SERVICE_ORDERS.make(order))
    queue.add(prompt(0, A), 0.0)
    assert queue.start(0.0) == [0]
    queue.waits_for_room(0)
    for number in range(1, 2 * LOOK_AHEAD):
        queue.add(prompt(number), 0.0)
    queue.add(prompt(1000, owned=True), 0.0)
    queue.add(prompt(1001, owned=True), 0.0)
    assert queue.end(1000)
    check_prompts(queue)
    assert queue.start(0.0) == [1001]
    queue.has_room(0)
    assert queue.start(0.0) == [1, 2]
    check_prompts(queue)


def test_only_turns_that_are_looked_at_are_asked_for() -> None:
    order = Counting(FifoOrder())
    queue = PromptQueue(Held(), active=2, limit=100, order=order)
    for number in range(50):
        queue.add(Prompt(number, 16, (), 0, owned=True), 0.0)
    assert queue.start(0.0) == [0, 1]
    assert order.asked == [0, 1]
    check_prompts(queue)


def test_a_prompt_with_late_room_waits_for_its_prefix_under_way(queue, held):
    """Both prompts would compute the prefix otherwise."""
    queue.add(prompt(0, A, B), 0.0)
    assert queue.start(0.0) == [0]
    queue.waits_for_room(0)
    queue.add(prompt(1, A, C, owned=True), 0.0)
    assert queue.start(0.0) == [1]
    assert not queue.held_back(1)
    queue.has_room(0)
    assert queue.held_back(0)
    assert queue.waiting_for_others == 1
    assert queue.start(0.0) == []
    held.keys.add(A)
    queue.published(1, [A])
    assert queue.start(0.0) == [0]
    assert not queue.held_back(0)
    assert queue.waiting_for_others == 0


@pytest.mark.parametrize("gone", [0, 1])
def test_whoever_is_held_back_goes_on_when_the_other_one_ends(queue, gone):
    for number in (0, 1):
        queue.add(prompt(number, A, B), 0.0)
    assert queue.start(0.0) == [0]
    queue.waits_for_room(0)
    queue.add(prompt(2, A, owned=True), 0.0)
    assert queue.start(0.0) == [2]
    queue.has_room(0)
    assert queue.held_back(0)
    queue.end(2 if gone else 0)
    check_prompts(queue)
    assert queue.start(0.0) == ([0] if gone else [])
    assert queue.waiting_for_others == 0


def test_a_block_evicted_before_it_was_reserved_is_claimed(queue, held):
    held.keys.add(A)
    queue.add(prompt(0, A, B), 0.0)
    assert queue.start(0.0) == [0]
    held.keys.remove(A)
    assert not queue.held_back(0)
    queue.add(prompt(1, A, C), 0.0)
    assert queue.start(0.0) == [], "0 computes it"
