"""Who is asked first whether there is room, where an order of service says it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pinyon.batching import BATCHING_POLICIES, BatchingPolicy, BatchRequest, BlockNeed
from pinyon.batching.fcfs import PATIENCE_MAX_S, PATIENCE_S
from pinyon.batching.service_order import MostInTime
from pinyon.batching.waiting_line import ByTurn


def request(number: int, seconds: float = 1.0, deadline_s: float = 100.0, blocks: int = 1) -> BatchRequest:
    return BatchRequest(number, 10, blocks, seconds=seconds, deadline_s=deadline_s)


class Books:
    def __init__(self) -> None:
        self.held: dict[int, int] = {}
        """Blocks of those admitted, as the test says."""

    def need(self, request: BatchRequest) -> BlockNeed:
        return BlockNeed(0, request.blocks)

    def behind(self, number: int) -> int:
        return sum(blocks for other, blocks in self.held.items() if other > number)


@pytest.fixture
def books() -> Books:
    return Books()


@pytest.fixture
def policy(books: Books) -> BatchingPolicy:
    return BATCHING_POLICIES.make("most_in_time:age_s=5").policy(books)


def test_room_goes_to_whose_turn_it_is(policy):
    """The shortest of those that can be in time, then who is late."""
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
    """15 s after it came, whatever its SLO; without one, too."""
    policy = BATCHING_POLICIES.make("most_in_time").policy(books)
    policy.enqueue(request(1, 8.0, deadline_s))
    for number in range(2, 12):
        policy.enqueue(request(number, 1.0, 1000.0))
    assert policy.admit(9, 1, now_s=15.0) == [2]
    assert policy.admit(9, 1, now_s=15.1) == [1]


def test_whose_turn_it_is_keeps_the_room_that_others_will_give_back(policy, books):
    """Else a large one would never enter among small ones; but it sends nobody away, however long that takes."""
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
    assert policy.admit(9, 3, now_s=1.0) == [
        2,
    ]
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
    asked: list[int] = []

    class Counting:
        short_first = True

        def __init__(self) -> None:
            self._order: MostInTime[int] = MostInTime()
            self.add, self.take = self._order.add, self._order.take

        def turns(self, now_s: float) -> Iterator[int]:
            for number in self._order.turns(now_s):
                asked.append(number)
                yield number

    line = ByTurn(Counting())
    for number in range(50):
        line.add(request(number), again=False)
    line.begin(0.0)
    first = line.at(0)
    assert first is not None
    line.take(first.number)
    second = line.at(0)
    line.end()
    assert [first.number, second.number] == asked == [0, 1]
    assert first.number not in line
    assert len(line) == 49
