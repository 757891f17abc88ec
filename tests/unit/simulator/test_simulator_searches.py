"""Searches for a number of instances and for a rate, which need few runs."""

from __future__ import annotations

import pytest

from pinyon.core.errors import InvalidArgument
from pinyon_lab.simulator.searches import Bounds, fewest, goodput


@pytest.mark.parametrize("needed", [1, 2, 3, 7, 8, 9, 100, 128])
def test_the_fewest_instances_are_found(needed: int) -> None:
    asked: list[int] = []

    def attained(size: int) -> float:
        asked.append(size)
        return 1.0 if size >= needed else size / needed * 0.9

    assert fewest(attained, 0.95, 128) == needed
    assert len(asked) == len(set(asked)) <= 16, "each is run once"


def test_no_size_is_found_where_none_is_enough() -> None:
    assert fewest(lambda size: 0.5, 0.9, 10) is None


@pytest.mark.parametrize("step", [1.1, 2.0])
@pytest.mark.parametrize("limit", [0.01, 1.0, 3.3, 4000.0])
def test_the_highest_rate_is_found(limit: float, step: float) -> None:
    def enough(share: float) -> bool:
        return share >= 0.9

    rate, share = goodput(lambda rate: 1.0 if rate <= limit else 0.1, enough, 1.0, step=step)
    assert share == 1.0
    assert limit / 1.006 <= rate <= limit


def test_no_rate_is_tried_that_is_more_than_a_step_too_high() -> None:
    tried: list[float] = []

    def served_at(rate: float) -> float:
        tried.append(rate)
        return rate

    goodput(served_at, lambda rate: rate <= 1.3, 1.0, step=1.1)
    assert max(tried) <= 1.3 * 1.1


def test_where_there_is_no_rate_that_is_said() -> None:
    with pytest.raises(InvalidArgument, match="at no rate are 90% of the requests in time"):
        goodput(lambda rate: rate, lambda rate: False, 1.0, "90% of the requests in time")
    tried: list[float] = []
    with pytest.raises(InvalidArgument, match="at no rate"):
        goodput(tried.append, lambda _: False, 4.0, least=1.0)
    assert tried == [4.0, 2.0, 1.0], "no further down than is asked"
    with pytest.raises(InvalidArgument, match="too little load"):
        goodput(lambda rate: rate, lambda rate: True, 1.0)


@pytest.mark.parametrize(
    ("report", "holds"),
    [
        ({"attainment": 0.92, "p99_s": 35.0, "attainment_last_quarter": 0.90}, True),
        ({"attainment": 0.89, "p99_s": 5.0, "attainment_last_quarter": 0.95}, False),
        ({"attainment": 0.92, "p99_s": 35.1, "attainment_last_quarter": 0.92}, False),
        ({"attainment": 0.95, "p99_s": 5.0, "attainment_last_quarter": 0.92}, False),
        ({"attainment": 0.0}, False),
    ],
)
def test_a_goodput_that_starves_is_none(report: dict[str, float], holds: bool) -> None:
    assert Bounds(0.9, 35.0, 0.02).hold(report) is holds
