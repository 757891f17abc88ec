from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinyon.core.errors import InvalidArgument
from pinyon_lab.simulator.regions.day import WILDCHAT_DAY, DailyLoad, aggregate, costs, variance


@given(st.floats(0, 23.99), st.floats(1, 100), st.floats(0.1, 1e3), st.floats(-100, 100))
def test_a_course_is_a_wave_a_day(peak_h: float, ratio: float, most: float, hour: float) -> None:
    course = DailyLoad(peak_h, ratio, most)
    assert course.at(peak_h) == pytest.approx(most)
    assert course.at(peak_h + 12) == pytest.approx(most / ratio)
    assert most / ratio * 0.999 <= course.at(hour) <= most * 1.001
    assert course.at(hour) == pytest.approx(course.at(hour + 24), rel=1e-6)


@pytest.mark.parametrize("wrong", [(24.0, 2.0, 1.0), (-1.0, 2.0, 1.0), (1.0, 0.5, 1.0), (1.0, 2.0, -1.0)])
def test_no_such_course(wrong: tuple[float, float, float]) -> None:
    with pytest.raises(InvalidArgument):
        DailyLoad(*wrong)


def test_the_day_has_what_the_paper_prints() -> None:
    loads = [course.slots() for course in WILDCHAT_DAY.values()]
    assert min(map(variance, loads)) == pytest.approx(2.88)
    assert max(map(variance, loads)) == pytest.approx(32.64)
    assert variance(aggregate(loads)) == pytest.approx(1.29, abs=0.005)


def test_costs_by_hand() -> None:
    found = costs({"day": [10.0, 0.0], "night": [0.0, 6.0]}, 2.0, reserved=1.0, on_demand=3.0)
    assert (found.region_local, found.shared) == (5 + 3, 5)
    assert found.on_demand_dollars == 3.0 * (5 + 3) / 2
    assert found.saved == 1 - 5 / 8
    assert found.on_demand_ratio == 12 / 5


@given(st.lists(st.lists(st.floats(0, 100), min_size=4, max_size=4), min_size=1, max_size=5), st.floats(0.5, 20))
def test_sharing_never_costs_more(loads: list[list[float]], per_instance: float) -> None:
    by_region = {f"r{place}": each for place, each in enumerate(loads)}
    if not max(map(sum, zip(*loads, strict=True))):
        with pytest.raises(InvalidArgument):
            costs(by_region, per_instance)
        return
    found = costs(by_region, per_instance)
    assert found.shared <= found.region_local
    assert found.shared == math.ceil(max(map(math.fsum, zip(*loads, strict=True))) / per_instance - 1e-9)
