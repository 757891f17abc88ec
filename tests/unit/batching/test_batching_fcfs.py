import pytest

from pinyon.batching import BatchRequest, Fcfs
from pinyon.batching.fcfs import LOOK_AHEAD, PATIENCE_MAX_S, PATIENCE_S
from tests.unit.batching.books import Books


def request(number: int, blocks: int = 1, decodes: bool = True, reusable: int = 0) -> BatchRequest:
    return BatchRequest(number, 10, blocks, (b"k",) * reusable, reusable, decodes)


@pytest.fixture
def books() -> Books:
    return Books()


@pytest.fixture
def policy(books: Books) -> Fcfs:
    return Fcfs(books)


def test_requests_enter_in_order_and_only_into_free_slots(policy):
    for number in (5, 3, 9, 1):
        policy.enqueue(request(number))
    assert policy.admit(2, 99, now_s=0.0) == [1, 3]
    assert (policy.waiting, policy.running) == (2, 2)
    assert policy.admit(0, 99, now_s=0.0) == []
    assert policy.admit(-1, 99, now_s=0.0) == []
    assert policy.admit(9, 99, now_s=0.0) == [5, 9]
    assert (policy.waiting, policy.running) == (0, 4)


def test_nobody_overtakes_a_request_that_waits_for_later_ones(policy, books):
    policy.enqueue(request(1, blocks=5))
    policy.enqueue(request(3, blocks=1))
    books.held = {2: 1}
    assert policy.admit(9, 4, now_s=0.0) == []
    assert policy.claimant() is None, "they may end by themselves"
    assert policy.admit(9, 4, now_s=PATIENCE_S) == []
    assert policy.claimant() == 1
    assert policy.admit(9, 5, now_s=PATIENCE_S) == [1]
    assert policy.claimant() is None
    assert policy.admit(9, 0, now_s=PATIENCE_S) == []


def test_later_requests_use_room_that_the_first_cannot_use_yet(policy, books):
    policy.enqueue(request(2, blocks=9))
    policy.enqueue(request(3, blocks=1))
    policy.enqueue(request(4, blocks=2))
    books.held = {1: 6}
    assert policy.admit(9, 3, now_s=0.0) == [3, 4]
    books.held = {1: 6, 3: 1, 4: 2}
    policy.enqueue(request(5, blocks=1))
    assert policy.admit(9, 0, now_s=9.0) == []
    assert policy.claimant() is None
    books.held = {3: 1, 4: 2}
    assert policy.admit(9, 6, now_s=9.0) == [], "now it is its turn"
    assert policy.admit(9, 9, now_s=9.1) == [2]


def test_a_prompt_for_another_instance_holds_up_others_briefly(policy, books):
    policy.enqueue(request(1, blocks=9, decodes=False))
    policy.enqueue(request(2, blocks=1))
    assert policy.admit(9, 3, now_s=0.0) == []
    assert policy.admit(9, 3, now_s=PATIENCE_S / 2) == []
    assert policy.admit(9, 3, now_s=PATIENCE_S) == [2]
    assert policy.claimant() is None


def test_few_are_looked_behind(policy):
    for number in range(LOOK_AHEAD):
        policy.enqueue(request(number, blocks=9))
    policy.enqueue(request(99))
    assert policy.admit(9, 1, now_s=0.0) == []
    assert policy.remove(3)
    assert policy.admit(9, 1, now_s=0.0) == [99]


def test_what_is_shared_with_others_takes_no_room(policy, books):
    policy.enqueue(request(1, blocks=5, reusable=3))
    assert policy.admit(9, 3, now_s=0.0) == []
    books.shared[1] = 2
    assert policy.admit(9, 3, now_s=0.0) == [1]


def test_a_request_without_a_slot_lets_others_that_need_none_by(policy):
    policy.enqueue(request(1))
    policy.enqueue(request(2, decodes=False))
    policy.enqueue(request(3))
    policy.enqueue(request(4, decodes=False))
    assert policy.admit(0, 9, now_s=0.0) == [2, 4]
    assert policy.admit(1, 9, now_s=0.0) == [1]


def test_who_gave_way_comes_before_those_that_came_later(policy):
    for number in (1, 2, 3):
        policy.enqueue(request(number))
    assert policy.admit(9, 2, now_s=0.0) == [1, 2]
    assert policy.remove(2)
    policy.enqueue(request(2, blocks=2))
    assert policy.admit(9, 2, now_s=0.0) == [2]


def test_what_is_removed_is_forgotten_whether_it_waits_or_runs(policy):
    policy.enqueue(request(1))
    policy.enqueue(request(2))
    assert policy.admit(1, 9, now_s=0.0) == [1]
    assert policy.remove(1)
    assert policy.remove(2)
    assert not policy.remove(2)
    assert (policy.waiting, policy.running) == (0, 0)


def test_a_number_that_is_known_is_refused(policy):
    policy.enqueue(request(1))
    with pytest.raises(ValueError, match="request 1"):
        policy.enqueue(request(1, decodes=False))
    policy.admit(1, 9, now_s=0.0)
    with pytest.raises(ValueError, match="request 1"):
        policy.enqueue(request(1))


def test_those_that_left_cost_nothing(policy):
    for number in range(10_000):
        policy.enqueue(request(number, blocks=99))
        assert policy.admit(1, 9, now_s=0.0) == []
        assert policy.remove(number)
    assert len(policy._decoded._order) < 200
    assert not policy._since_s


def stay(policy: Fcfs, number: int, begin_s: float, end_s: float) -> None:
    policy.enqueue(request(number))
    assert policy.admit(9, 99, now_s=begin_s) == [number]
    assert policy.remove(number)
    assert policy.admit(9, 99, now_s=end_s) == []


def claims_after(policy: Fcfs, books: Books, now_s: float, decodes: bool = True) -> float:
    """Returns how long a request waits for later arrivals, in seconds, before these are to give way."""
    policy.enqueue(request(100, blocks=5, decodes=decodes))
    books.held = {101: 5}
    tenths = 0
    while True:
        assert policy.admit(9, 4, now_s=now_s + tenths / 10) == []
        if policy.claimant() == 100:
            policy.remove(100)
            return tenths / 10
        tenths += 1
        assert tenths < 10_000


def test_where_requests_stay_for_long_nobody_gives_way_sooner(policy, books):
    assert claims_after(policy, books, 0.0) == PATIENCE_S
    stay(policy, 1, 100.0, 110.0)
    assert claims_after(policy, books, 200.0) == pytest.approx(20.0, abs=0.11)
    for number in range(2, 200):
        stay(policy, number, 1000.0 + number, 1000.2 + number)
    assert claims_after(policy, books, 2000.0) == PATIENCE_S


def test_who_gives_way_and_comes_back_stays_all_the_while(policy, books):
    policy.enqueue(request(1))
    assert policy.admit(9, 99, now_s=0.0) == [1]
    for now_s in (1.0, 2.0, 3.0):
        assert policy.remove(1)
        policy.enqueue(request(1))
        assert policy.admit(9, 99, now_s=now_s) == [1]
    assert claims_after(policy, books, 10.0) == PATIENCE_S, "giving way is no end"
    assert policy.remove(1)
    assert policy.admit(9, 99, now_s=30.0) == []
    assert claims_after(policy, books, 100.0) == pytest.approx(60.0, abs=0.11)


def test_leaving_the_queue_after_preemption_counts_as_no_stay(policy, books):
    policy.enqueue(request(1))
    assert policy.admit(9, 99, now_s=0.0) == [1]
    policy.remove(1)
    policy.enqueue(request(1))
    assert policy.admit(9, 0, now_s=50.0) == []
    assert policy.remove(1)
    assert claims_after(policy, books, 60.0) == PATIENCE_S
    policy.enqueue(request(2, decodes=False))
    assert policy.admit(9, 99, now_s=100.0) == [2]
    assert policy.remove(2)
    assert claims_after(policy, books, 300.0) == PATIENCE_S, "a prompt for another instance is not decoded here"


def test_a_prompt_for_another_instance_does_not_wait_for_stays(policy, books):
    """Requests behind the prompt may wait for prompts of the other instance: none would end, and stays would grow."""
    stay(policy, 1, 0.0, 30.0)
    assert claims_after(policy, books, 100.0, decodes=False) == PATIENCE_S
    assert claims_after(policy, books, 200.0) == pytest.approx(PATIENCE_MAX_S, abs=0.11)


def test_who_came_first_waits_no_longer_than_the_limit(policy, books):
    stay(policy, 1, 0.0, 10_000.0)
    assert claims_after(policy, books, 20_000.0) == pytest.approx(PATIENCE_MAX_S, abs=0.11)
