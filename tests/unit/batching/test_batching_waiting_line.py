"""Tests of the line that asks requests for room in an order of service."""

from __future__ import annotations

import pytest

from pinyon.batching import BATCHING_POLICIES, BatchingPolicy, BatchRequest, Fcfs
from pinyon.batching.fcfs import LOOK_AHEAD, PATIENCE_MAX_S, PATIENCE_S
from pinyon.batching.service_order import MostInTime
from pinyon.batching.waiting_line import KEPT_S, ByTurn
from tests.unit.batching.books import Books, Counting


def request(number: int, seconds: float = 1.0, deadline_s: float = 100.0, blocks: int = 1) -> BatchRequest:
    return BatchRequest(number, 10, blocks, seconds=seconds, deadline_s=deadline_s)


@pytest.fixture
def books() -> Books:
    return Books()


@pytest.fixture
def policy(books: Books) -> BatchingPolicy:
    return BATCHING_POLICIES.make("most_in_time:age_s=5").policy(books)


def test_room_goes_to_whose_turn_it_is(policy):
    """The shortest request that can be in time comes first, then late ones."""
    for number, seconds, deadline_s in ((1, 9.0, 8.0), (2, 3.0, 20.0), (3, 2.0, 20.0), (4, 1.0, 20.0)):
        policy.enqueue(request(number, seconds, deadline_s))
    assert policy.admit(9, 2, now_s=0.0) == [4, 3]
    assert policy.admit(1, 9, now_s=0.0) == [2]
    assert policy.admit(1, 9, now_s=0.0) == [1]
    assert (policy.waiting, policy.running) == (0, 4)


def test_late_for_long_it_has_its_share(policy):
    policy.enqueue(request(1, 4.0, 1.0))
    for number in range(2, 12):
        policy.enqueue(request(number, 4.0, 1000.0))
    assert policy.admit(9, 1, now_s=6.0) == [2]
    assert policy.admit(9, 2, now_s=6.1) == [1, 3]


@pytest.mark.parametrize("deadline_s", [0.0, 5.0, 30.0])
def test_by_default_it_has_its_share_before_a_worker_refuses_it(books, deadline_s):
    """The share comes 15 s after the request did, with any SLO or none."""
    policy = BATCHING_POLICIES.make("most_in_time").policy(books)
    policy.enqueue(request(1, 8.0, deadline_s))
    for number in range(2, 12):
        policy.enqueue(request(number, 1.0, 1000.0))
    assert policy.admit(9, 1, now_s=15.0) == [2]
    assert policy.admit(9, 1, now_s=15.1) == [1]


def test_the_next_in_turn_keeps_the_room_others_will_give_back(policy, books):
    """A large request would otherwise never enter among small ones. But it preempts none, however long it waits."""
    policy.enqueue(request(1, 1.0, blocks=5))
    policy.enqueue(request(3, 2.0))
    books.held = {2: 4}
    for now_s in (0.0, PATIENCE_S, 2 * PATIENCE_MAX_S):
        assert policy.admit(9, 1, now_s) == []
        assert policy.claimant() is None
    books.held = {}
    assert policy.admit(9, 5, 2 * PATIENCE_MAX_S) == [1]


def test_who_gave_way_goes_first_and_claims_what_came_after_it(policy, books):
    for number in (1, 2):
        policy.enqueue(request(number, blocks=3))
    assert policy.admit(9, 6, now_s=0.0) == [1, 2]
    books.held = {1: 3}
    assert policy.remove(2)
    policy.enqueue(request(2, 9.0, 1.0, blocks=3))
    policy.enqueue(request(3, 0.1, blocks=1))
    assert policy.admit(9, 3, now_s=1.0) == [2]
    books.held = {1: 3, 3: 3}
    assert policy.remove(2)
    policy.enqueue(request(2, 9.0, 1.0, blocks=3))
    assert policy.admit(9, 1, now_s=2.0) == []
    assert policy.admit(9, 1, now_s=2.0 + PATIENCE_MAX_S) == []
    assert policy.claimant() == 2


def test_those_that_leave_are_not_asked(policy):
    for number in (1, 2, 3):
        policy.enqueue(request(number))
    assert policy.remove(1)
    assert not policy.remove(1)
    assert policy.admit(9, 9, now_s=0.0) == [2, 3]


def test_only_turns_that_are_looked_at_are_asked_for():
    order = Counting(MostInTime())
    line = ByTurn(order)
    for number in range(50):
        line.add(request(number), again=False)
    line.begin(0.0, 9)
    first = line.at(0)
    assert first is not None
    line.take(first.number, 8)
    second = line.at(0)
    line.end()
    assert [first.number, second.number] == order.asked == [0, 1]
    assert first.number not in line
    assert len(line) == 49


def test_without_room_for_anybody_no_turn_is_asked_for(books):
    """The line is asked at every arrival and every release: a burst costs no looks at the order."""
    order = Counting(MostInTime())
    policy = Fcfs(books, ByTurn(order))
    for number in range(2_000):
        policy.enqueue(request(number, blocks=2 + number % 5))
        assert policy.admit(9, 1, now_s=number / 1000) == []
    assert order.asked == []
    assert policy.admit(9, 2, now_s=2.0) == [0]
    assert len(order.asked) == 1, "no room is left for a second look"


def test_turns_hold_for_a_moment(books):
    """The room fits only a small request far behind: asking again costs no looks, nor do newcomers that do not fit."""
    order = Counting(MostInTime())
    policy = Fcfs(books, ByTurn(order))
    for number in range(50):
        policy.enqueue(request(number, blocks=9))
    policy.enqueue(request(50, seconds=2.0, blocks=1))
    for number in range(51, 1_000):
        assert policy.admit(9, 1, now_s=0.0) == []
        policy.enqueue(request(number, blocks=2))
        assert number == 51 or policy.remove(number - 1)
    assert len(order.asked) == LOOK_AHEAD
    assert policy.admit(9, 1, now_s=KEPT_S) == []
    assert len(order.asked) == 2 * LOOK_AHEAD
    policy.enqueue(request(1_000, seconds=0.1))
    assert policy.admit(9, 1, now_s=KEPT_S) == [1_000]


def test_with_more_room_newcomers_count_who_keep_it(books):
    policy = BATCHING_POLICIES.make("most_in_time").policy(books)
    books.held = {99: 9}
    policy.enqueue(request(1, seconds=2.0, blocks=3))
    policy.enqueue(request(2, seconds=3.0, blocks=1))
    assert policy.admit(9, 1, now_s=0.0) == []
    policy.enqueue(request(3, seconds=1.0, blocks=5))
    assert policy.admit(9, 3, now_s=0.0) == []
    assert policy.admit(9, 5, now_s=0.0) == [3]


def test_what_left_or_was_taken_of_the_turns_that_hold_has_none(books):
    order = Counting(MostInTime())
    policy = Fcfs(books, ByTurn(order))
    for number in range(20):
        policy.enqueue(request(number, seconds=1.0 + number, deadline_s=1e6, blocks=2 if number < 12 else 1))
    assert policy.admit(9, 1, now_s=0.0) == []
    assert policy.remove(0)
    assert policy.admit(9, 2, now_s=0.0) == [1]
    assert policy.admit(2, 9, now_s=0.0) == [2, 3]
    assert policy.admit(99, 99, now_s=0.0) == list(range(4, 20))
    assert policy.waiting == 0


@pytest.mark.parametrize("name", BATCHING_POLICIES.names)
def test_a_prompt_for_another_instance_passes_one_keeping_room(books, name):
    """The request may depend on that prompt, and requests whose room it waits for may depend on such prompts, too."""
    policy = BATCHING_POLICIES.make(name).policy(books)
    policy.enqueue(request(1, blocks=5))
    policy.enqueue(request(3, blocks=1))
    policy.enqueue(BatchRequest(4, 10, 1, decodes=False))
    policy.enqueue(BatchRequest(5, 10, 9, decodes=False))
    books.held = {2: 4}
    assert policy.admit(9, 4, now_s=0.0) == [4]
    assert policy.claimant() is None
    books.held = {2: 4, 4: 1}
    policy.enqueue(BatchRequest(6, 10, 1, decodes=False))
    later = policy.admit(9, 3, now_s=PATIENCE_S)
    if name in ("fcfs", "sglang_fcfs", "dynamic"):  # policies whose queue is in order of arrival
        assert (later, policy.claimant()) == ([], 1), "once others give way to it, no request takes their room"
    else:
        assert (later, policy.claimant()) == ([6], None)
