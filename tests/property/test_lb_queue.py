"""The promises of the load balancer's queue to tenants about each other, and its hint of how long it takes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinyon.core.errors import ResourceExhausted
from pinyon.routing.queue import RETRY_AFTER_MAX_S, RETRY_AFTER_MIN_S, RequestQueue
from tests.queue_integrity import check_queue


def enter(queue: RequestQueue, number: int, now_s: float, tenant: str = "t", tokens: int = 1) -> bool:
    assert queue.reserve(number, tenant, now_s) is None
    return queue.enter(number, tokens, now_s)


def test_one_tenants_flood_neither_fills_nor_delays_the_queue() -> None:
    queue = RequestQueue(2, 100)
    assert enter(queue, -1, 0.0, "flood")
    assert enter(queue, -2, 0.0, "flood")
    for number in range(100):
        assert not enter(queue, number, 0.0, "flood", 100)
    with pytest.raises(ResourceExhausted):
        queue.reserve(100, "flood", 0.0)
    assert queue.reserve(1000, "quiet", 0.0) == 99, "the newest of the longest gives way"
    assert not queue.enter(1000, 100, 0.0)
    assert [queue.leave(1.0), queue.leave(1.0)] == [0, 1000], "not behind the flood"
    check_queue(queue)


@given(
    st.dictionaries(st.sampled_from("abcd"), st.integers(1, 400), min_size=2),
    st.integers(1, 3),
    st.integers(50, 200),
)
def test_tenants_that_always_wait_get_the_same_tokens(costs: dict[str, int], slots: int, leaves: int) -> None:
    """Two tenants that always wait never differ by more than their largest request, whatever their requests cost."""
    queue = RequestQueue(slots, 1000)
    number = 0

    def ask(tenant: str) -> None:
        nonlocal number
        number += 1
        owner[number] = tenant
        enter(queue, number, 0.0, tenant, costs.get(tenant, 1))

    owner: dict[int, str] = {}
    for _ in range(slots):
        ask("first")
    for tenant in costs:
        for _ in range(3):
            ask(tenant)
    served = dict.fromkeys(costs, 0)
    for _ in range(leaves):
        following = queue.leave(1.0)
        assert following is not None
        served[owner[following]] += costs[owner[following]]
        ask(owner[following])
        for one in costs:
            for other in costs:
                assert abs(served[one] - served[other]) <= costs[one] + costs[other]
    check_queue(queue)


def test_nothing_is_saved_up_by_not_asking() -> None:
    queue = RequestQueue(1, 1000)
    enter(queue, 0, 0.0, "busy")
    for number in range(1, 101):
        enter(queue, number, 0.0, "busy", 10)
    for _ in range(50):
        queue.leave(1.0)
    for number in range(1000, 1050):
        enter(queue, number, 1.0, "late", 10)
    following = [queue.leave(2.0) for _ in range(20)]
    late = sum(number is not None and number >= 1000 for number in following)
    assert late in (10, 11), "half of what there is now, not what it left to others before"


@pytest.mark.parametrize("leave", [False, True])
def test_a_tenant_that_cancels_its_requests_keeps_its_debt(leave: bool) -> None:
    """The debt outlives a tenant's last waiting request, whether that is cancelled or served."""
    queue = RequestQueue(1, 1000)
    enter(queue, 0, 0.0)
    for number in range(1, 101):
        enter(queue, number, 0.0, "patient", 10)
    served = dict.fromkeys(("patient", "sly"), 0)
    number = 1000
    mine: list[int] = []
    for _ in range(100):
        for each in mine:
            queue.cancel(each, 0.0)
        mine = [number + 1] if leave else [number + 1, number + 2]
        number += 2
        for each in mine:
            enter(queue, each, 0.0, "sly", 100)
        following = queue.leave(0.0)
        assert following is not None
        if following in mine:
            mine.remove(following)
            served["sly"] += 100
        else:
            served["patient"] += 10
    assert abs(served["sly"] - served["patient"]) <= 110
    check_queue(queue)


def test_the_hint_follows_the_pace() -> None:
    queue = RequestQueue(1, 20)
    enter(queue, 0, 0.0)
    for number in range(1, 21):
        enter(queue, number, 0.0)
    assert queue.full().retry_after_s == RETRY_AFTER_MIN_S, "nothing is known yet"
    now_s = 0.0
    for number in range(21, 41):
        now_s += 0.5
        queue.leave(now_s)
        enter(queue, number, now_s)
    assert queue.full().retry_after_s == pytest.approx(10.0)
    for number in range(41, 91):
        now_s += 100.0
        queue.leave(now_s)
        enter(queue, number, now_s)
    assert queue.full().retry_after_s == RETRY_AFTER_MAX_S


def test_misuse_is_an_error_and_changes_nothing() -> None:
    queue = RequestQueue(1, 2)
    with pytest.raises(ValueError, match="nobody"):
        queue.leave(0.0)
    assert enter(queue, 1, 0.0)
    assert not enter(queue, 2, 0.0)
    with pytest.raises(ValueError, match="2 has a place"):
        queue.reserve(2, "t", 1.0)
    for number in (1, 2, 3):
        with pytest.raises(ValueError, match=f"{number} has no reserved"):
            queue.enter(number, 1, 1.0)
    check_queue(queue)
    assert (queue.in_flight, queue.queued) == (1, 1)
