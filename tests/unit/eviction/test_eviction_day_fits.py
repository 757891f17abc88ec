"""Fits of an earlier day: as text, as a file, and a policy's use of them."""

from __future__ import annotations

import contextlib
import json
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinyon.eviction import EVICTION_POLICIES, Traits
from pinyon.eviction.day_fits import CATEGORIES_MAX, DayFits
from pinyon.eviction.fit import PRIOR, Fit
from pinyon.eviction.workload_aware import WorkloadAware

CHAT, FILE = Traits("chat/1"), Traits("file/1")
NINE = {"": Fit(0.4, 100.0), "chat/1": Fit(0.7, 30.0), "file/1": Fit(0.1, 500.0)}
TEN = {"": Fit(0.3, 200.0), "chat/1": Fit(0.2, 40.0)}
YESTERDAY = DayFits({9: NINE, 10: TEN})

categories = st.just("") | st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,31}/[0-9]{1,7}\Z")
fits = st.builds(Fit, st.floats(0, 1), st.floats(1e-3, 1e9))
several = st.dictionaries(categories, fits, min_size=1, max_size=4)
days = st.builds(DayFits, st.dictionaries(st.integers(0, 23), several, max_size=4))


@given(days)
def test_text_and_json_give_back_what_was_written(day: DayFits) -> None:
    if day:
        assert DayFits.of_json(json.dumps(day.json())) == day
    again = DayFits.of_text(str(day))
    assert {hour: [*several] for hour, several in again.hours.items()} == {h: [*f] for h, f in day.hours.items()}
    for hour, several in day.hours.items():
        for category, fit in several.items():
            assert again.hours[hour][category] == pytest.approx(fit, rel=1e-3), "to four digits"
    assert not {",", "="} & set(str(day)), "it is an option's value"


@given(st.text() | st.recursive(st.none() | st.floats() | st.integers() | st.text(), st.lists).map(json.dumps))
def test_whatever_is_read_is_fits_or_an_error(text: str) -> None:
    for read in (DayFits.of_json, DayFits.of_text):
        with contextlib.suppress(ValueError):
            assert isinstance(read(text), DayFits)


@pytest.mark.parametrize(
    ("hours", "said"),
    [
        ({}, "no JSON object with hours"),
        ({"24": {}}, "hours from 0 to 23, got '24'"),
        ({"09": {}}, "hours from 0 to 23, got '09'"),
        ({"9": []}, "fits of hour 9 are no objects with share and mean_s"),
        ({"9": {"": {"share": 0.5}}}, "fits of hour 9 are no objects with share and mean_s"),
        ({"9": {"": {"share": 0.5, "mean_s": 10**400}}}, "both numbers from 0 to 1e9"),
        ({"9": {"": {"share": 0.5, "mean_s": math.nan}}}, "both numbers from 0 to 1e9"),
        ({"9": {"": {"share": 1.5, "mean_s": 1}}}, "hour 9, 'all': a share from 0 to 1"),
        ({"9": {"chat/1": {"share": 0.5, "mean_s": 0}}}, "hour 9, 'chat/1': a share from 0 to 1 and seconds"),
        ({"9": {"a,b": {"share": 0.5, "mean_s": 1}}}, "hour 9, 'a,b': a category is TYPE/TURN"),
        ({"9": {f"a/{n}": {"share": 0, "mean_s": 1} for n in range(CATEGORIES_MAX + 1)}}, "64 are allowed"),
    ],
)
def test_what_is_wrong_is_named(hours: object, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        DayFits.of_json(json.dumps({"hours": hours}))


def policy(options: str = "") -> WorkloadAware[int]:
    made = EVICTION_POLICIES.make(f"workload_aware:fits={YESTERDAY}{options}")
    assert isinstance(made, WorkloadAware)
    return made


def learn(policy: WorkloadAware[int], now_s: float) -> None:
    work = policy.refit(now_s)
    assert work is not None
    policy.adopt(work())


def test_the_hour_of_the_day_decides_which() -> None:
    for options, midnight_s in (("", 0.0), (",midnight_s=-4000", -4000.0), (",fitted=false", 0.0)):
        started = policy(options)
        for day in (0, 1):
            for hour, fits in ((8, {"": PRIOR}), (9, NINE), (10, TEN), (11, {"": PRIOR})):
                learn(started, midnight_s + day * 86_400 + hour * 3600 + 10)
                assert started.fits == fits


def test_what_is_seen_takes_over_by_category_once_it_is_enough() -> None:
    started = policy(",refit_s=1")
    now_s = 9 * 3600.0
    started.stored(range(100), now_s, CHAT, range(100))
    started.used(range(31), now_s + 10, None, range(31))
    learn(started, now_s + 11)
    assert started.fits == NINE, "31 are not enough"
    started.used([31, 32], now_s + 12, None, [31, 32])
    learn(started, now_s + 12)
    assert started.fits["chat/1"].mean_s == pytest.approx((31 * 10 + 2 * 12) / 33, rel=1e-2)
    assert started.fits["file/1"] == NINE["file/1"], "nothing is seen of these"
    assert started.fits[""] == started.fits["chat/1"], "all that is seen"
    only = policy(",refit_s=1,fitted=false")
    only.stored(range(100), now_s, CHAT, range(100))
    only.used(range(100), now_s + 10, None, range(100))
    learn(only, now_s + 11)
    assert only.fits == NINE


def test_yesterday_decides_who_goes_before_anything_is_seen() -> None:
    """A file's block is younger and was hardly ever reused; LRU and a policy without knowledge keep it."""
    for started, victim in ((policy(), 2), (EVICTION_POLICIES.make("workload_aware"), 1)):
        assert isinstance(started, WorkloadAware)
        learn(started, 9 * 3600.0)
        started.stored([1], 9 * 3600.0, CHAT, [0])
        started.stored([2], 9 * 3600.0 + 5, FILE, [0])
        assert started.victims(1, 9 * 3600.0 + 6) == [victim]


@pytest.mark.parametrize("option", ["fits=yesterday.json", "fits=9:chat/1@2@3", "midnight_s=1e13", "midnight_s=nan"])
def test_options_have_bounds(option: str) -> None:
    with pytest.raises(ValueError, match=option.partition("=")[0]):
        EVICTION_POLICIES.make(f"workload_aware:{option}")
