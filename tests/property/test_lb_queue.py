"""The promises of the load balancer's queue about tenants, room, priority and requests put back, and its cost."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable
from types import FrameType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinyon.core.compiled import compiled
from pinyon.core.errors import InvalidArgument, ResourceExhausted
from pinyon.routing.queue import RETRY_AFTER_MAX_S, RETRY_AFTER_MIN_S, RequestQueue
from tests.queue_integrity import check_queue


def enter(
    queue: RequestQueue,
    number: int,
    now_s: float = 0.0,
    tenant: str = "t",
    tokens: int = 1,
    *,
    priority: int = 0,
    demand: int = 0,
    room: bool = True,
) -> bool:
    assert queue.reserve(number, tenant, now_s) is None
    return queue.enter(number, tokens, now_s, priority=priority, demand=demand, open=room)


def everyone(queue: RequestQueue, now_s: float = 0.0, closed: frozenset[int] = frozenset()) -> list[int]:
    """Returns the requests that go on until none can."""
    gone: list[int] = []
    while (number := queue.next(now_s, closed)) is not None:
        gone.append(number)
    return gone


# -- tenants


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
    st.dictionaries(st.sampled_from("abcd"), st.integers(1, 400), min_size=2), st.integers(1, 3), st.integers(50, 200)
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


# -- room


def test_a_demand_without_room_holds_up_no_other() -> None:
    queue = RequestQueue(10, 10)
    assert not enter(queue, 1, demand=1, room=False)
    assert not enter(queue, 2, demand=1, room=True), "not before who waits for the same"
    assert enter(queue, 3, demand=2), "the same tenant's"
    assert enter(queue, 4, tenant="other", demand=2)
    assert not enter(queue, 5, demand=2, room=False)
    assert queue.waiting_demands == {1, 2}
    assert everyone(queue, closed=frozenset({1})) == [5]
    check_queue(queue, {1})
    with pytest.raises(AssertionError, match="beside a free slot"):
        check_queue(queue)
    assert everyone(queue) == [1, 2]
    assert (queue.in_flight, queue.queued) == (5, 0)


def test_a_slot_that_is_left_goes_to_who_has_room_or_stays_free() -> None:
    queue = RequestQueue(1, 10)
    assert enter(queue, 0)
    assert not enter(queue, 1, demand=1)
    assert not enter(queue, 2, demand=2)
    assert queue.leave(0.0, [1]) == 2
    assert queue.leave(0.0, [1, 2]) is None
    assert (queue.in_flight, queue.queued, queue.can_go_on) == (0, 1, True)
    assert queue.next(0.0, [1]) is None
    assert queue.next(0.0) == 1


@given(st.integers(2, 5), st.integers(1, 3))
def test_tenants_share_the_room_that_there_is(tenants: int, slots: int) -> None:
    """Two demands, one of which has room at every second event. Requests whose demand has room share it equally.

    A tenant that lacked room is owed nothing later."""
    queue = RequestQueue(slots, 10_000)
    owners: dict[int, str] = {}

    def ask(tenant: str, demand: int) -> None:
        owners[len(owners)] = tenant
        enter(queue, len(owners) - 1, tenant=tenant, demand=demand, tokens=10, room=False)

    names = [f"always {number}" for number in range(tenants)]
    for _ in range(200):
        for name in names:
            ask(name, 0)
        ask("now and then", 1)
    served = dict.fromkeys([*names, "now and then"], 0)
    for number in range(100):
        closed = [1] if number % 2 or number < 50 else []
        given_to = queue.next(0.0, closed) if queue.in_flight < slots else queue.leave(0.0, closed)
        assert given_to is not None
        served[owners[given_to]] += 1
        if number == 49:
            assert served["now and then"] == 0
    assert max(served[name] for name in names) - min(served[name] for name in names) <= 1
    assert served["now and then"] <= 100 / tenants / 2 + 2, "what it did not get before is not made up for"
    assert served["now and then"] >= 50 / (tenants + 1) / 2, "when it has room it is not passed over"
    check_queue(queue, [1])


# -- priority


def test_the_urgent_go_first_within_their_tenant_alone() -> None:
    queue = RequestQueue(1, 100, ageing_s=1.0)
    enter(queue, 0, tenant="x")
    for number, (tenant, priority) in enumerate([("a", 0), ("a", -1), ("b", 5), ("a", 1), ("b", -1000), ("b", 5)], 1):
        assert not enter(queue, number, tenant=tenant, priority=priority)
    assert [queue.leave(0.0) for _ in range(6)] == [2, 5, 1, 3, 4, 6], "by turns, however urgent one's are"


@given(st.integers(-1000, 1000), st.sampled_from([0.01, 0.1, 2.0]))
def test_nobody_waits_forever_for_those_who_are_urgent(priority: int, ageing_s: float) -> None:
    """Urgent requests arrive twice as fast as they go. A less urgent one waits only for those of its ageing time."""
    queue = RequestQueue(1, 1 << 20, ageing_s)
    enter(queue, 0)
    assert not enter(queue, 1, 0.0, priority=priority)
    levels_a_turn, number = 10, 1
    turns = 2 * (priority + 1000) // levels_a_turn + 2
    given_to: int | None = None
    for turn in range(1, turns + 1):
        now_s = turn * levels_a_turn * ageing_s
        for _ in range(2):
            number += 1
            enter(queue, number, now_s, priority=-1000)
        given_to = queue.leave(now_s)
        if given_to == 1:
            break
    assert given_to == 1, f"it still waits after {turns} turns"


def test_without_ageing_only_the_order_of_arrival_counts() -> None:
    queue = RequestQueue(1, 100, ageing_s=0.0)
    enter(queue, 0)
    for number in range(1, 50):
        enter(queue, number, number / 2, priority=random.Random(number).randint(-1000, 1000))
    assert [queue.leave(100.0) for _ in range(1, 50)] == list(range(1, 50))


# -- requests put back


def test_who_is_put_back_is_where_it_was() -> None:
    queue = RequestQueue(2, 1)
    assert enter(queue, 1, 1.0)
    assert enter(queue, 2, 2.0, demand=7)
    assert not enter(queue, 3, 3.0, demand=7)
    with pytest.raises(ResourceExhausted):
        queue.reserve(4, "t", 4.0)
    queue.put_back(2, "t", 1, 2.0, demand=7)
    assert (queue.in_flight, queue.queued) == (1, 2)
    check_queue(queue, [7])
    with pytest.raises(ResourceExhausted):
        queue.reserve(4, "t", 4.0)
    assert queue.reserve(5, "other", 5.0) == 3, "who was put back is not the newest"
    assert queue.cancel(5, 5.0)
    assert queue.next(6.0) == 2


def test_requests_put_back_go_before_others_of_the_same_time() -> None:
    queue = RequestQueue(2, 10)
    for number in range(1, 5):
        enter(queue, number, 1.0, room=False)
    assert [queue.next(2.0), queue.next(2.0)] == [1, 2]
    for number in (1, 2):
        queue.put_back(number, "t", 1, 1.0)
    assert [queue.next(3.0), queue.next(3.0)] == [1, 2]
    assert [queue.leave(4.0), queue.leave(4.0)] == [3, 4]


@pytest.mark.parametrize("at_once", [1, 200])
def test_being_refused_costs_a_tenant_nothing(at_once: int) -> None:
    """A tenant whose requests are each put back once, even one at a time, gets as many turns that count as another."""
    queue = RequestQueue(1, 1000)
    enter(queue, 0, tenant="x")
    owners: dict[int, str] = {}

    def ask(tenant: str) -> None:
        owners[len(owners) + 1] = tenant
        enter(queue, len(owners), 0.0, tenant, tokens=10)

    for _ in range(at_once):
        ask("refused")
    for _ in range(200):
        ask("lucky")
    served = dict.fromkeys(("refused", "lucky"), 0)
    was_refused: set[int] = set()
    given_to = queue.leave(0.0)
    while sum(served.values()) < 200:
        assert given_to is not None
        if owners[given_to] == "refused" and given_to not in was_refused:
            was_refused.add(given_to)
            queue.put_back(given_to, "refused", 10, 0.0)
            check_queue(queue, [0])
            given_to = queue.next(0.0)
            continue
        served[owners[given_to]] += 1
        if owners[given_to] == "refused":
            ask("refused")
        given_to = queue.leave(0.0)
    assert abs(served["refused"] - served["lucky"]) <= 1


# -- the hint


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


def test_room_for_many_at_once_is_their_common_pace() -> None:
    """A probe every 100 ms finds room for ten, so on average one goes every 10 ms."""
    queue = RequestQueue(10_000, 1000)
    for number in range(5000):
        enter(queue, number, room=False)
    for probe in range(200):
        for _ in range(10):
            assert queue.next(probe / 10) is not None
    hint_s = queue.full().retry_after_s
    assert hint_s == pytest.approx(3000 * 0.01)
    quarter = RequestQueue(10_000, 1000)
    for number in range(750):
        enter(quarter, number, room=False)
    for probe in range(10):
        for _ in range(25):
            quarter.next(probe / 2)
    assert quarter.full().retry_after_s == pytest.approx(500 * 0.02)


def test_who_is_put_back_does_not_count_as_one_who_went() -> None:
    """A probe lets ten go, of which nine are refused: one goes each second."""
    queue = RequestQueue(1000, 1000)
    for number in range(25):
        enter(queue, number, room=False)
    for probe in range(10):
        went = [queue.next(float(probe)) for _ in range(10)]
        for number in went[1:]:
            assert number is not None
            queue.put_back(number, "t", 1, 0.0)
    assert queue.full().retry_after_s == pytest.approx(15.0)


def test_that_there_is_no_room_for_long_counts() -> None:
    queue = RequestQueue(1000, 1000)
    for number in range(800):
        enter(queue, number, room=False)
    for each in range(400):
        queue.next(each / 1000)
    assert queue.full().retry_after_s == RETRY_AFTER_MIN_S
    assert queue.next(10.0, [0]) is None
    assert RETRY_AFTER_MIN_S < queue.full().retry_after_s <= RETRY_AFTER_MAX_S


# -- misuse


def test_misuse_is_an_error_and_changes_nothing() -> None:
    for ageing_s in (-0.1, math.inf, math.nan):
        with pytest.raises(ValueError, match="ageing_s"):
            RequestQueue(1, 1, ageing_s)
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
    queue = RequestQueue(2, 2)
    with pytest.raises(ValueError, match="nobody"):
        queue.put_back(1, "t", 1, 0.0)
    queue.reserve(1, "t", 0.0)
    with pytest.raises(InvalidArgument, match="priority"):
        queue.enter(1, 1, 0.0, priority=1001)
    assert queue.enter(1, 1, 0.0)
    assert not enter(queue, 2, room=False)
    with pytest.raises(ValueError, match="2 has a place"):
        queue.put_back(2, "t", 1, 0.0)
    with pytest.raises(InvalidArgument, match="priority"):
        queue.put_back(1, "t", 1, 0.0, priority=-1001)
    assert (queue.in_flight, queue.queued) == (1, 1)
    check_queue(queue, [0])


# -- cost


def work(do: Callable[[], None]) -> int:
    """Returns the number of interpreter instructions of the queue's own code and its callees."""
    count = 0

    def each(frame: FrameType, event: str, _: object) -> Callable[..., object]:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return each

    before = sys.gettrace()
    sys.settrace(each)
    try:
        do()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.skipif(compiled(), reason="counts what the interpreter does")
@pytest.mark.parametrize(("tenants", "demands"), [(1, 1), (1, 8), (100, 8)])
def test_an_operation_costs_the_same_however_many_wait(tenants: int, demands: int) -> None:
    def of(waiting: int) -> float:
        rng = random.Random(2)
        queue = RequestQueue(10, 2 * waiting)
        for number in range(waiting):
            tenant, demand = str(number % tenants), rng.randrange(demands)
            enter(queue, number, tenant=tenant, demand=demand, priority=rng.randint(-9, 9), room=False)
        operations = 400

        def some() -> None:
            for number in range(waiting, waiting + operations):
                closed = rng.sample(range(demands), demands // 2)
                enter(queue, number, 1.0, str(number % tenants), demand=rng.randrange(demands), room=False)
                queue.cancel(rng.randrange(number), 1.0)
                given_to = queue.next(1.0, closed) if queue.in_flight < 10 else queue.leave(1.0, closed)
                if number % 4 == 0 and given_to is not None:
                    queue.put_back(given_to, str(given_to % tenants), 1, 0.0)

        return work(some) / operations

    few, many = of(1000), of(16_000)
    assert many < 1.5 * few, f"{few:.0f} and {many:.0f} instructions for one of 1,000 and 16,000 that wait"


@pytest.mark.skipif(compiled(), reason="counts what the interpreter does")
def test_tenants_without_room_cost_nothing() -> None:
    """A thousand tenants lack room; when their room comes and goes, it costs no more than the tenants that go on."""

    def of(blocked: int) -> int:
        queue = RequestQueue(5000, 5000)
        for number in range(1000):
            enter(queue, number, tenant=str(number % blocked), demand=1, room=False)
            enter(queue, 1000 + number, tenant=f"o{number % 3}", demand=2, tokens=100, room=False)

        def by_turns() -> None:
            for _ in range(300):
                queue.next(1.0, [1])
                queue.next(1.0, [2])

        return work(by_turns)

    few, many = of(2), of(1000)
    assert many < 1.5 * few
