"""Whose turn it is, against looking at everybody each time."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pinyon.batching.service_order import SERVICE_ORDERS, ShortestInTime, ShortestInTimeSettings


def naive(waiting: dict[int, tuple[float, float]], now_s: float, age_s: float) -> int:
    """As they came: number → seconds, deadline."""
    for number, (_, deadline_s) in waiting.items():
        if now_s - deadline_s > age_s:
            return number
    in_time = [(seconds, number) for number, (seconds, end_s) in waiting.items() if now_s + seconds <= end_s]
    return min(in_time)[1] if in_time else next(iter(waiting))


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 1 << 32), st.sampled_from((0.0, 1.0, 10.0)))
def test_the_shortest_in_time_then_as_they_came(seed: int, age_s: float) -> None:
    rng, order = Random(seed), ShortestInTime[int](ShortestInTimeSettings(age_s))
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
                assert order.first(now_s, count) == turns[:count]
            if what < 0.8:
                assert order.next(now_s) == turns[0]
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
    assert sorted(order.next(float(turn)) for turn in range(100)) == list(range(100))  # type: ignore[type-var]
    assert order.next(100.0) is None


def test_nobody_starves() -> None:
    """A long one among short ones that keep coming: late for long, it goes first."""
    order = ShortestInTime[str](ShortestInTimeSettings(age_s=3.0))
    order.add("long", 0.0, 4.0, 5.0)
    now_s = 0.0
    for number in range(100):
        order.add(f"short {number}", now_s, 0.1, now_s + 5.0)
        if order.next(now_s) == "long":
            break
        now_s += 0.1
    assert 8.0 < now_s < 8.3


@pytest.mark.parametrize("deadline_s", [math.inf, 4e6])
def test_who_names_no_time_or_a_far_one_does_not_starve(deadline_s: float) -> None:
    order = ShortestInTime[str](ShortestInTimeSettings(age_s=3.0, patience_s=5.0))
    order.add("long", 0.0, 4.0, deadline_s)
    for number in range(100):
        order.add(f"short {number}", number * 0.1, 0.1, deadline_s)
        if order.next(number * 0.1) == "long":
            break
    assert number == 81


@pytest.mark.parametrize("age_s", ["-1", "1e9"])
def test_settings_are_checked(age_s: str) -> None:
    with pytest.raises(ValueError, match="age_s must be from"):
        SERVICE_ORDERS.make(f"shortest_in_time:age_s={age_s}")
