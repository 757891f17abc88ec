import pytest

from pinyon.batching import BatchRequest, Fcfs


def request(number: int) -> BatchRequest:
    return BatchRequest(number, prompt_tokens=10, max_new_tokens=5)


def test_requests_enter_in_the_order_they_came_and_no_more_than_there_are_slots():
    policy = Fcfs()
    for number in (5, 3, 9, 1):
        policy.enqueue(request(number))
    assert policy.admit(2, now_s=0.0) == [5, 3]
    assert (policy.waiting, policy.running) == (2, 2)
    assert policy.admit(0, now_s=0.0) == []
    assert policy.admit(-1, now_s=0.0) == []
    assert policy.admit(9, now_s=0.0) == [9, 1]
    assert (policy.waiting, policy.running) == (0, 4)


def test_what_is_removed_is_forgotten_whether_it_waits_or_runs():
    policy = Fcfs()
    policy.enqueue(request(1))
    policy.enqueue(request(2))
    assert policy.admit(1, now_s=0.0) == [1]
    assert policy.remove(1)
    assert policy.remove(2)
    assert not policy.remove(2)
    assert (policy.waiting, policy.running) == (0, 0)


def test_a_number_that_is_known_is_refused():
    policy = Fcfs()
    policy.enqueue(request(1))
    with pytest.raises(ValueError, match="request 1"):
        policy.enqueue(request(1))
    policy.admit(1, now_s=0.0)
    with pytest.raises(ValueError, match="request 1"):
        policy.enqueue(request(1))
