"""Peers that fail repeatedly: how often they are tried, and when pauses end, with those of refusing regions."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from pinyon.core.avoidance import Avoidance
from pinyon.frontdoor.served_models import REFUSED_FIRST_S as FIRST_S
from pinyon.frontdoor.served_models import REFUSED_MAX_S as MAX_S


class Model:
    """The rule, computed from all past events."""

    def __init__(self) -> None:
        self.refusals: list[float] = []
        """The times of refusals that count, without a success between them."""

    @property
    def until_s(self) -> float:
        return max((at + self._pause(number) for number, at in enumerate(self.refusals)), default=-math.inf)

    def _pause(self, number: int) -> float:
        return min(MAX_S, FIRST_S * 2**number)

    def refused(self, now_s: float) -> None:
        if self.refusals and now_s - self.until_s > MAX_S:
            self.refusals = []
        if not self.refusals or now_s >= self.until_s:
            self.refusals.append(now_s)
        self.last_s = now_s

    def accepted(self, sent_s: float) -> None:
        if self.refusals and self.last_s <= sent_s:
            self.refusals = []


@given(st.lists(st.tuples(st.sampled_from(("refused", "accepted", "gone")), st.integers(0, 400), st.integers(0, 50))))
def test_against_a_model(steps):
    pauses, model, now = Avoidance(first_s=FIRST_S, max_s=MAX_S), Model(), 0
    for what, passed, ago in steps:
        now += passed
        now_s, sent_s = now / 64, (now - ago) / 64  # exact in binary
        if what == "refused":
            pauses.failed("eu", now_s)
            model.refused(now_s)
        elif what == "accepted":
            pauses.succeeded("eu", sent_s)
            model.accepted(sent_s)
        else:
            pauses.succeeded("eu")
            model.refusals = []
        assert pauses.avoids("eu", now_s) == (now_s < model.until_s)
        assert not pauses.avoids("ap", now_s)


@given(st.integers(2, 300), st.integers(1, 8))
def test_who_refuses_each_time_is_asked_less_and_less(ticks, at_once):
    """The region reports room every 100 ms."""
    pauses, asked = Avoidance(first_s=FIRST_S, max_s=MAX_S), 0
    for tick in range(ticks):
        now_s = tick / 10
        if not pauses.avoids("eu", now_s):
            asked += 1
            for _ in range(at_once):
                pauses.failed("eu", now_s)
    assert asked <= 7 + ticks / 10 / MAX_S
    assert not pauses.avoids("eu", ticks / 10 + MAX_S)
