import pytest

from pinyon.batching import BatchRequest, BlockNeed, Fcfs


def request(number: int, blocks: int = 1, decodes: bool = True, reusable: int = 0) -> BatchRequest:
    return BatchRequest(number, 10, blocks, (b"k",) * reusable, reusable, decodes)


@pytest.fixture
def held() -> dict[int, int]:
    """Blocks that a request shares with those that run, by number."""
    return {}


@pytest.fixture
def policy(held: dict[int, int]) -> Fcfs:
    return Fcfs(lambda each: BlockNeed(held.get(each.number, 0), each.blocks - held.get(each.number, 0)))


def test_requests_enter_in_the_order_they_came_and_no_more_than_there_are_slots(policy):
    for number in (5, 3, 9, 1):
        policy.enqueue(request(number))
    assert policy.admit(2, 99, now_s=0.0) == [1, 3]
    assert (policy.waiting, policy.running) == (2, 2)
    assert policy.admit(0, 99, now_s=0.0) == []
    assert policy.admit(-1, 99, now_s=0.0) == []
    assert policy.admit(9, 99, now_s=0.0) == [5, 9]
    assert (policy.waiting, policy.running) == (0, 4)


def test_nobody_overtakes_the_one_that_waits_for_more_room(policy):
    policy.enqueue(request(1, blocks=5))
    policy.enqueue(request(2, blocks=1))
    assert policy.admit(9, 4, now_s=0.0) == []
    assert policy.admit(9, 5, now_s=0.0) == [1]
    assert policy.admit(9, 0, now_s=0.0) == []


def test_what_is_shared_with_others_takes_no_room(policy, held):
    policy.enqueue(request(1, blocks=5, reusable=3))
    assert policy.admit(9, 3, now_s=0.0) == []
    held[1] = 2
    assert policy.admit(9, 3, now_s=0.0) == [1]


def test_who_lacks_only_a_slot_does_not_stop_those_that_need_none(policy):
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
    assert policy.admit(9, 1, now_s=0.0) == []
    assert policy.admit(9, 3, now_s=0.0) == [2, 3]


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
