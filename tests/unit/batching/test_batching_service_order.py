"""Tests of the order of service, compared with a search of all requests each time."""

from __future__ import annotations

import math
from itertools import combinations, islice
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pinyon.batching.interface import ServiceOrder, Waiting
from pinyon.batching.service_order import (
    LEAST_S,
    SERVICE_ORDERS,
    AgeingSettings,
    MostInTime,
    MostInTimeSettings,
    ShortestInTime,
)
from tests.long import usually


def naive(waiting: dict[int, tuple[float, float]], now_s: float, age_s: float) -> int:
    """Returns the next of the waiting requests, given in order of arrival: number → seconds, deadline."""
    for number, (_, deadline_s) in waiting.items():
        if now_s - deadline_s > age_s:
            return number
    in_time = [(seconds, number) for number, (seconds, end_s) in waiting.items() if now_s + seconds <= end_s]
    return min(in_time)[1] if in_time else next(iter(waiting))


def taken(order: ServiceOrder[Waiting], now_s: float) -> Waiting | None:
    """Takes the prompt whose turn it is; None if none waits."""
    first = next(order.turns(now_s), None)
    if first is not None:
        order.take(first, now_s)
    return first


@settings(max_examples=usually(80, long=200), deadline=None)
@given(st.integers(0, 1 << 32), st.sampled_from((0.0, 1.0, 10.0)))
def test_the_shortest_in_time_then_as_they_came(seed: int, age_s: float) -> None:
    rng, order = Random(seed), ShortestInTime[int](AgeingSettings(age_s))
    waiting: dict[int, tuple[float, float]] = {}
    now_s = 0.0
    for number in range(120):
        now_s += rng.choice((0.0, 0.1, 1.0, 4.0))
        what = rng.random()
        if what < 0.5:
            seconds, deadline_s = rng.choice((0.1, 0.5, 2.0)), now_s + rng.choice((0.2, 1.0, 5.0))
            order.add(number, now_s, seconds, deadline_s)
            waiting[number] = seconds, deadline_s
        elif what < 0.6 and waiting:
            gone = rng.choice(list(waiting))
            order.remove(gone)
            del waiting[gone]
        elif waiting:
            turns, left = [], dict(waiting)
            while left:
                turns.append(naive(left, now_s, age_s))
                del left[turns[-1]]
            for count in (1, 3, len(turns), len(turns) + 1):
                assert list(islice(order.turns(now_s), count)) == turns[:count]
            if what < 0.8:
                assert taken(order, now_s) == turns[0]
            else:
                order.remove(turns[0])
            del waiting[turns[0]]
        assert list(order) == list(waiting)
        assert len(order) == len(waiting)


@pytest.mark.parametrize("choice", SERVICE_ORDERS.names)
def test_everybody_has_a_turn(choice: str) -> None:
    order = SERVICE_ORDERS.make(choice)
    for number in range(100):
        order.add(number, 0.0, float(number % 7), 50.0)
    assert sorted(taken(order, float(turn)) for turn in range(100)) == list(range(100))  # type: ignore[type-var]
    assert taken(order, 100.0) is None


@pytest.mark.parametrize(("choice", "seconds"), [("shortest_in_time", 4.0), ("most_in_time", 6.0)])
def test_nobody_starves(choice: str, seconds: float) -> None:
    """A long prompt among endless short ones goes first once it is late for long."""
    order = SERVICE_ORDERS.make(f"{choice}:age_s=3.0")
    order.add("long", 0.0, seconds, 5.0)
    now_s = 0.0
    for number in range(100):
        order.add(f"short {number}", now_s, 0.1, now_s + 5.0)
        if taken(order, now_s) == "long":
            break
        now_s += 0.1
    assert 8.0 < now_s < 8.3


@pytest.mark.parametrize("deadline_s", [math.inf, 4e6])
def test_who_names_no_time_or_a_far_one_does_not_starve(deadline_s: float) -> None:
    order = ShortestInTime[str](AgeingSettings(age_s=3.0, patience_s=5.0))
    order.add("long", 0.0, 4.0, deadline_s)
    for number in range(100):
        order.add(f"short {number}", number * 0.1, 0.1, deadline_s)
        if taken(order, number * 0.1) == "long":
            break
    assert number == 81


@pytest.mark.parametrize("age_s", ["-1", "1e9"])
def test_settings_are_checked(age_s: str) -> None:
    with pytest.raises(ValueError, match="age_s must be from"):
        SERVICE_ORDERS.make(f"shortest_in_time:age_s={age_s}")


Prompts = dict[int, tuple[float, float]]
"""The seconds (a whole number) and the deadline of each prompt, by number."""


def most_in_time(prompts: Prompts, now_s: float) -> int:
    """Returns the size of the largest set that can be in time: a set can if it is in time in order of deadline."""
    for count in range(len(prompts), 0, -1):
        for chosen in combinations(prompts.values(), count):
            ends_s = now_s
            for seconds, deadline_s in sorted(chosen, key=lambda each: each[1]):
                ends_s += seconds
                if ends_s > deadline_s:
                    break
            else:
                return count
    return 0


@settings(max_examples=usually(120, long=300), deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 25)), min_size=1, max_size=8))
def test_as_many_are_in_time_as_can_be(rows: list[tuple[int, int]]) -> None:
    prompts: Prompts = {number: (float(seconds), float(end)) for number, (seconds, end) in enumerate(rows)}
    order = MostInTime[int](MostInTimeSettings(age_s=1e6))
    for number, (seconds, deadline_s) in prompts.items():
        order.add(number, 0.0, seconds, deadline_s)
    now_s, in_time, best = 0.0, 0, most_in_time(prompts, 0.0)
    while len(order):
        turns = list(order.turns(now_s))
        assert sorted(turns) == sorted(order)
        number = taken(order, now_s)
        assert number == turns[0]
        assert number is not None
        seconds, deadline_s = prompts.pop(number)
        now_s += seconds
        in_time += now_s <= deadline_s
        assert in_time + most_in_time(prompts, now_s) == best


@settings(max_examples=usually(80, long=200), deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=10))
def test_with_time_for_all_the_shortest_goes_first(lengths: list[int]) -> None:
    order = MostInTime[int]()
    for number, seconds in enumerate(lengths):
        order.add(number, 0.0, seconds, 1e3 - number)
    assert [lengths[number] for number in order.turns(0.0)] == sorted(lengths)


@settings(max_examples=usually(80, long=200), deadline=None)
@given(st.integers(0, 1 << 32), st.sampled_from((0.1, 0.5, 4.0)))
def test_the_books_of_most_in_time_hold(seed: int, share: float) -> None:
    """Each request that came and did not leave is there once, even if it became late or aged in between.

    Predicted turns come as predicted."""
    rng, order = Random(seed), MostInTime[int](MostInTimeSettings(age_s=2.0, patience_s=6.0, aged_share=share))
    waiting: dict[int, float] = {}
    now_s = 0.0
    for number in range(150):
        now_s += rng.choice((0.0, 0.1, 1.0))
        if rng.random() < 0.6:
            deadline_s = now_s + rng.choice((0.2, 1.0, 5.0, math.inf))
            order.add(number, now_s, rng.choice((0.1, 0.5, 2.0)), deadline_s)
            waiting[number] = min(deadline_s, now_s + 6.0)
        elif waiting and rng.random() < 0.5:
            gone = rng.choice(list(waiting))
            order.remove(gone)
            del waiting[gone]
        turns = list(order.turns(now_s))
        assert sorted(turns) == list(waiting) == list(order)
        for place in range(rng.choice((0, 0, 1, 3))):
            assert taken(order, now_s) == (turns[place] if place < len(turns) else None)
            if place < len(turns):
                del waiting[turns[place]]


@pytest.mark.parametrize("share", [0.1, 0.25, 1.0])
def test_those_late_for_long_have_their_share_and_no_more(share: float) -> None:
    """Arrivals exceed by half what can be computed: late prompts pile up without end, the others are in time."""
    order = MostInTime[int](MostInTimeSettings(age_s=5.0, aged_share=share))
    rng, now_s, came = Random(1), 0.0, 0
    arrived: dict[int, float] = {}
    spent_s = {True: 0.0, False: 0.0}
    while now_s < 400.0:
        while came / 1.5 <= now_s:
            arrived[came] = came / 1.5
            order.add(came, now_s, rng.choice((0.5, 1.0, 1.5)), arrived[came] + 5.0)
            came += 1
        seconds = {number: each.seconds for number, each in order._all.items()}
        number = taken(order, now_s)
        if number is None:
            now_s = came / 1.5
            continue
        if now_s > 100.0:
            spent_s[now_s - arrived[number] > 10.0] += seconds[number]
        now_s += seconds[number]
    assert spent_s[True] / spent_s[False] == pytest.approx(share, rel=0.1)


def test_of_very_many_some_are_looked_at() -> None:
    order = MostInTime[int]()
    for number in range(5_000):
        order.add(number, 0.0, 1.0 + number % 7, 1e6)
        if number % 5:
            order.remove(number)
    assert sorted(islice(order.turns(0.0), 1_000)) == list(range(0, 5_000, 5))


@pytest.mark.parametrize("choice", SERVICE_ORDERS.names)
def test_what_was_computed_of_one_does_not_count_any_more(choice: str) -> None:
    """A long prompt has the shortest remainder left; the books hold."""
    order = SERVICE_ORDERS.make(choice)
    for name, seconds in (("long", 5.0), ("short", 1.0), ("late", 3.0)):
        order.add(name, 0.0, seconds, 2.0 if name == "late" else 20.0)
    turns = {"fifo": ["long", "short", "late"]}.get(choice, ["short", "long", "late"])
    assert list(order.turns(0.0)) == turns
    order.advance("late", 1.0)
    order.advance("long", 4.5)
    assert list(order.turns(0.0))[:2] == ["long", "short"]
    order.advance("long", 4.5)
    assert [taken(order, 0.0) for _ in range(4)] == ["long", "short", "late", None]


def test_partial_work_on_late_prompts_counts_in_their_share() -> None:
    order: MostInTime[str] = MostInTime(MostInTimeSettings(age_s=1.0, aged_share=0.5))
    order.add("old", 0.0, 8.0, 1.0)
    order.add("new", 0.0, 8.0, 1e3)
    served = []
    for second in range(9):
        first = next(order.turns(10.0 + second))
        order.advance(first, 1.0)
        served.append(first)
    assert served == ["old", "new", "new"] * 3


def test_those_late_for_long_do_not_save_up_missed_turns():
    order: MostInTime[str] = MostInTime()
    order.add("old", 0.0, 1.0, 1.0)
    for number in range(400):
        order.add(f"new-{number}", 30.0, 1.0, 1e9)
    for number in range(200):  # the aged prompt waits for KV memory, and others go meanwhile
        order.take(f"new-{number}", 30.0)
    for number in range(200):
        order.add(f"old-{number}", 30.0, 1.0, 31.0)
    went = [taken(order, 100.0) for _ in range(100)]
    assert 20 <= sum(str(each).startswith("old") for each in went) <= 25


@pytest.mark.parametrize("step_s", [0.1, 1.0])
@pytest.mark.parametrize("share", [0.25, 1.0])
def test_prompts_of_unknown_time_use_up_the_time_they_take(share: float, step_s: float) -> None:
    """Two prompts of 2 s are late for long among endless such prompts: the second comes 2 s / share after the first."""
    order: MostInTime[str] = MostInTime(MostInTimeSettings(age_s=1.0, aged_share=share))
    order.add("old 1", 0.0, 2.0, 1.0)
    order.add("old 2", 0.0, 2.0, 1.0)
    now_s, went_s = 10.0, []
    for number in range(1000):
        order.add(f"new {number}", now_s, 0.0, math.inf)
        first = taken(order, now_s)
        assert first is not None
        if first.startswith("old"):
            now_s += 2.0
            went_s.append(now_s)
            if len(went_s) == 2:
                break
        else:
            now_s += step_s
    assert went_s == [12.0, pytest.approx(12.0 + 2.0 / share + 2.0, abs=step_s + 0.1)]


def test_where_the_clock_stands_each_turn_counts_a_little() -> None:
    """Aged requests count too: they go first, but not all of them."""
    order: MostInTime[int] = MostInTime(MostInTimeSettings(age_s=1.0, aged_share=0.25))
    for number in range(40):
        order.add(number, 0.0, 0.0, 1.0 if number < 20 else 1e6)
    turns = list(order.turns(10.0))
    went = [taken(order, 10.0) for _ in range(40)]
    assert went == turns
    assert [number < 20 for number in turns[:10]] == [True, False, False, False, False] * 2


@settings(max_examples=usually(40, long=100), deadline=None)
@given(st.integers(0, 1 << 32), st.sampled_from((0.25, 0.5, 1.0)))
def test_who_is_late_for_long_waits_for_no_more_than_the_share(seed: int, share: float) -> None:
    """The bound holds for any time that other requests take, predicted or not; there are always other requests."""
    rng, order = Random(seed), MostInTime[int](MostInTimeSettings(age_s=1.0, aged_share=share))
    for number in range(10):
        order.add(-1 - number, 0.0, rng.choice((0.0, 0.5, 2.0)), 1.0)
    now_s, had_s, others_s, number = 10.0, 0.0, 0.0, 0
    while min(order) < 0:
        order.add(number, now_s, rng.choice((0.0, 0.0, 0.1, 1.0)), math.inf)
        number += 1
        said_s = {each: prompt.seconds for each, prompt in order._all.items()}
        first = taken(order, now_s)
        assert first is not None
        took_s = said_s[first] or rng.choice((0.1, 0.3))
        if first < 0:
            had_s, others_s = max(LEAST_S, said_s[first]), 0.0
        else:
            assert others_s < had_s / share + 1e-6
            others_s += took_s
        now_s += took_s
