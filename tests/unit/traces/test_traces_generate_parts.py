"""The sources of generated workloads: quantiles, users, hours, distributions, ids."""

from __future__ import annotations

import math
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinyon_lab.traces.generate import PROFILES, profile
from pinyon_lab.traces.generate.draws import Ids, Quantiles, Users, exponential, log_normal
from pinyon_lab.traces.generate.profile import Hours, UserGroups

HOUR_S = 3600.0


@st.composite
def points(draw: st.DrawFn) -> list[tuple[float, float]]:
    inner = draw(st.lists(st.floats(0.01, 0.99), max_size=4, unique=True))
    shares = [0.0, *sorted(inner), 1.0]
    values = sorted(draw(st.lists(st.floats(1e-3, 1e6), min_size=len(shares), max_size=len(shares))))
    return list(zip(shares, values, strict=True))


@given(points(), st.floats(0, 1, exclude_max=True))
def test_quantiles_are_numpys_interpolation_of_the_logarithms(given: list[tuple[float, float]], share: float) -> None:
    shares, values = zip(*given, strict=True)
    expected = math.exp(float(np.interp(share, shares, np.log(values))))
    assert Quantiles(*given).at(share) == pytest.approx(expected, rel=1e-6)


def test_quantiles_by_hand() -> None:
    tokens = Quantiles((0, 1), (0.5, 100), (0.9, 1000), (1, 1000))
    found = [round(tokens.at(share), 6) for share in (0, 0.25, 0.5, 0.7, 0.9, 0.99)]
    assert found == [1, 10, 100, 316.227766, 1000, 1000]


@pytest.mark.parametrize(
    ("nonsense", "said"),
    [
        ([], "shares"),
        ([(0.1, 1), (1, 2)], "shares"),
        ([(0, 1), (0.9, 2)], "shares"),
        ([(0, 1), (0.9, 2), (0.5, 3), (1, 4)], "shares"),
        ([(0, 0), (1, 1)], "values"),
        ([(0, 2), (0.5, 1), (1, 3)], "values"),
    ],
)
def test_what_are_no_quantiles(nonsense: list[tuple[float, float]], said: str) -> None:
    with pytest.raises(ValueError, match=f"{said} do not rise"):
        Quantiles(*nonsense)


@given(st.integers(25, 3_000), st.floats(1, 20))
def test_users_meet_the_points(count: int, steepness: float) -> None:
    given = ((0.19, 0.5), (0.72, 0.9), (1.0, 1.0))
    sent = UserGroups(count, given, steepness).weights()
    assert len(sent) == count
    assert sum(sent) == pytest.approx(1)
    before = 0
    for share, of_all in given:
        until = round(share * count)
        assert sum(sent[:until]) == pytest.approx(of_all)
        group = sent[before:until]
        assert group == sorted(group, reverse=True)
        assert group[0] / group[-1] == pytest.approx(steepness ** (1 - 1 / len(group)))
        before = until


def test_users_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="2 users are too few"):
        UserGroups(2, ((0.4, 0.5), (0.8, 0.9), (1.0, 1.0)), 4.0).weights()
    with pytest.raises(ValueError, match="the last group is not all users"):
        UserGroups(10, ((0.2, 0.5), (1.0, 0.9)), 4.0).weights()


@pytest.mark.parametrize("name", PROFILES)
def test_the_fewest_users_of_a_profile_are_enough(name: str) -> None:
    users = profile(name, users=PROFILES[name].free["users"].low).users
    assert sum(users.weights()) == pytest.approx(1)


def test_users_are_picked_by_weight() -> None:
    users, rng = Users([0.5, 0.3, 0.2]), Random(1)
    picked = np.bincount([users.pick(rng) for _ in range(10_000)]) / 10_000
    assert picked == pytest.approx([0.5, 0.3, 0.2], abs=0.02)  # four standard deviations


@given(st.floats(0.05, 1), st.floats(1, 3), st.floats(0, 10 * 24 * HOUR_S))
def test_hours(night: float, slower: float, at_s: float) -> None:
    hours = Hours(night, slower)
    assert night <= hours.rate(at_s) <= 1
    assert hours.rate(4 * HOUR_S) == pytest.approx(night)
    for hour in (10, 16, 21):
        assert (hours.rate(hour * HOUR_S), hours.slowness(hour * HOUR_S)) == pytest.approx((1, 1))
    assert hours.rate(at_s) == pytest.approx(hours.rate(at_s + 24 * HOUR_S))
    assert 1 <= hours.slowness(at_s) <= slower * (1 + 1e-12)
    if night < 1:
        assert hours.slowness(4 * HOUR_S) == pytest.approx(slower)


def test_distributions() -> None:
    rng = Random(1)
    times = np.array([exponential(rng, 380.0) for _ in range(10_000)])
    assert times.mean() == pytest.approx(380, rel=0.04)  # four standard deviations
    assert np.percentile(times, 50) == pytest.approx(380 * math.log(2), rel=0.04)
    factors = np.array([log_normal(rng, 0.7) for _ in range(10_000)])
    assert factors.mean() == pytest.approx(1, rel=0.04)
    assert np.log(factors).std() == pytest.approx(0.7, rel=0.04)
    state = rng.getstate()
    assert log_normal(rng, 0.0) == 1.0
    assert rng.getstate() == state, "nothing drawn"


def test_ids_are_given_once() -> None:
    ids = Ids(16)
    given = ids.fresh(2), ids.extended([7], 33), ids.extended([7, 8], 32), ids.fresh(-1)
    assert given == ([0, 1], [7, 2, 3], [7, 8], [])
    assert (ids.fresh(1), ids.name(), ids.name()) == ([4], "1", "2")
