"""Tests of the times at which instances are added or removed."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from pinyon.core.errors import InvalidArgument
from pinyon.placement.scaling import Scaler, ScalingSettings, parse_sizes

SETTINGS = ScalingSettings(2, 8, hold_s=0.0)


def scaler(settings: ScalingSettings = SETTINGS) -> Scaler:
    return Scaler(settings, 0.0)


def place(of: Scaler, start_s: float, end_s: float, per_s: float, ttft_s: float, prefill_s: float) -> None:
    for number in range(int((end_s - start_s) * per_s)):
        of.placed(ttft_s, prefill_s, start_s + number / per_s)


def test_some_are_added_where_first_tokens_are_late() -> None:
    late = scaler()
    place(late, 0.0, 10.0, 4.0, 6.0, 1.0)
    assert late.decide([1.0, 1.0, 1.0], 10.0) == 3
    place(late, 10.0, 69.0, 4.0, 6.0, 1.0)
    assert late.decide([1.0] * 6, 69.0) == 0, "new instances need time to show their effect"
    assert late.decide([1.0] * 6, 70.0) == 2, "not beyond the maximum"
    place(late, 70.0, 140.0, 4.0, 6.0, 1.0)
    assert late.decide([1.0] * 8, 140.0) == 0


def test_one_late_request_in_ten_is_as_agreed() -> None:
    agreed = scaler()
    place(agreed, 0.0, 20.0, 4.0, 1.0, 0.1)
    place(agreed, 0.0, 20.0, 0.4, 9.0, 0.1)
    assert agreed.decide([0.0] * 2, 20.0) == 0
    place(agreed, 20.0, 21.0, 4.0, 9.0, 0.1)
    assert agreed.decide([0.0] * 2, 21.0) == 2


def test_a_few_late_ones_tell_nothing() -> None:
    few = scaler()
    place(few, 0.0, 4.0, 4.0, 9.0, 0.1)
    assert few.decide([0.0] * 2, 4.0) == 0


def test_some_are_added_where_all_are_overloaded() -> None:
    assert scaler().decide([2.4, 2.6], 1.0) == 0
    assert scaler().decide([2.5, 2.6], 1.0) == 2
    assert scaler().decide([9.0, 0.0, 0.0, 0.0], 1.0) == 0, "one full instance is a matter of placement"


def test_a_burst_adds_nothing() -> None:
    patient = scaler(ScalingSettings(2, 8, hold_s=10.0))
    assert patient.decide([9.0, 9.0], 1.0) == 0
    assert patient.decide([9.0, 9.0], 9.0) == 0
    assert patient.decide([1.0, 1.0], 10.0) == 0
    assert patient.decide([9.0, 9.0], 11.0) == 0
    assert patient.decide([9.0, 9.0], 20.9) == 0
    assert patient.decide([9.0, 9.0], 21.0) == 2


def test_the_slo_of_a_request_counts() -> None:
    own = scaler()
    for number in range(30):
        own.placed(1.0, 0.1, number * 0.1, slo_s=0.5)
    assert own.decide([0.0] * 2, 3.0) == 2


@pytest.mark.parametrize("slo_s", [0.0, 5.0])
def test_what_no_idle_instance_answers_in_time_asks_for_none(slo_s: float) -> None:
    """The requests still count as work: the instances that serve them are not idle."""
    long = scaler()
    for number in range(400):
        long.placed(6.1, 6.0, number * 0.5, slo_s, own_s=6.1)
        assert long.decide([0.0] * 4, number * 0.5) == 0, "twelve are busy all the time"
    late = scaler()
    for number in range(60):
        late.placed(6.1, 4.8, number * 0.5, slo_s, own_s=4.9)
    assert late.decide([0.0] * 4, 30.0) == 4


def test_they_go_one_by_one_while_the_others_stay_idle() -> None:
    idle, count, left = scaler(), 8, []
    for second in range(0, 900, 5):
        place(idle, second, second + 5, 4.0, 0.5, 0.5)  # two seconds of work in each
        change = idle.decide([0.2] * count, second + 5.0)
        assert change in (0, -1)
        if change:
            left.append(second + 5.0)
        count += change
    assert count == 5, "each of five computes 40 % of the time; each of four would compute half of it"
    assert all(later - former >= SETTINGS.between_s for former, later in pairwise(left))


def test_nobody_goes_while_one_is_overloaded_or_little_is_known() -> None:
    assert scaler().decide([0.0] * 8, 29.0) == 0
    assert scaler().decide([0.0] * 8, 30.0) == -1
    assert scaler().decide([*[0.0] * 7, 2.6], 30.0) == 0


def test_the_least_are_there_whatever_happens() -> None:
    assert scaler().decide([], 0.0) == 2
    assert scaler().decide([0.0] * 2, 500.0) == 0


def test_bounds_hold_whatever_comes() -> None:
    rng, of, count, now_s = random.Random(3), scaler(), 4, 0.0
    for _ in range(5000):
        now_s += rng.choice([0.1, 1.0, 10.0])
        for _ in range(rng.randint(0, 5)):
            of.placed(rng.choice([0.1, 4.0, 6.0, float("inf")]), rng.random(), now_s)
        count += of.decide([rng.choice([0.0, 2.0, 6.0]) for _ in range(count)], now_s)
        assert SETTINGS.least <= count <= SETTINGS.most


@pytest.mark.parametrize("change", [{"least": 0}, {"most": 1}, {"share": 1.5}, {"window_s": 0.0}, {"grow": -1.0}])
def test_settings_are_checked(change: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be"):
        ScalingSettings(**{"least": 2, "most": 8, **change})  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["3", "0-4", "5-4", "a-b", "1-99999", "-4"])
def test_sizes(text: str) -> None:
    with pytest.raises(InvalidArgument, match="LEAST-MOST"):
        parse_sizes(text)
    assert parse_sizes("") is None
    assert parse_sizes("2-8") == (2, 8)


def test_a_burst_long_ago_is_not_held_against_anybody() -> None:
    patient = scaler(ScalingSettings(2, 8, hold_s=10.0))
    assert patient.decide([9.0, 9.0], 1.0) == 0
    assert patient.decide([0.0], 5.0) == 1, "an instance was lost"
    assert patient.decide([9.0, 9.0], 5000.0) == 0


def test_one_that_goes_keeps_nobody_from_coming() -> None:
    eager = scaler()
    assert eager.decide([0.0] * 4, 130.0) == -1
    assert eager.decide([99.0] * 3, 131.0) == 3


def test_no_time_between_two_that_go() -> None:
    hasty = Scaler(ScalingSettings(1, 3, between_s=0.0), 0.0)
    assert hasty.decide([0.0, 0.0], 0.0) == 0
    assert hasty.decide([0.0, 0.0], 1.0) == -1


def test_requests_too_late_even_for_an_idle_cluster_ask_for_none() -> None:
    late = scaler()
    for number in range(100):
        late.placed(6.1, 6.1, 0.1 * number)
        late.placed(9.0, 1.0, 0.1 * number, 0.0, own_s=8.0)
        late.placed(3.0, 2.5, 0.1 * number, slo_s=2.0)
    assert late.decide([0.0] * 2, 10.0) == 0
    place(late, 10.0, 20.0, 4.0, 6.1, 1.0)
    assert late.decide([0.0] * 2, 20.0) == 2
