"""A region that says it has room and refuses: how often it is asked, and when it is believed again."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from pinyon.routing.refusals import FIRST_S, MAX_S, Refusals
from pinyon.routing.target import Report

ROOM = Report(pending=0, room=4, available=2)


class Model:
    """What the rule is, from all that has happened."""

    def __init__(self) -> None:
        self.refusals: list[float] = []
        """Those that count, in a row."""

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
    refusals, model, now = Refusals(), Model(), 0
    for what, passed, ago in steps:
        now += passed
        now_s, sent_s = now / 64, (now - ago) / 64  # exact in binary
        if what == "refused":
            refusals.refused("eu", now_s)
            model.refused(now_s)
        elif what == "accepted":
            refusals.accepted("eu", sent_s)
            model.accepted(sent_s)
        else:
            refusals.gone("eu")
            model.refusals = []
        believed = refusals.believed("eu", ROOM, now_s)
        assert believed == (ROOM if now_s >= model.until_s else Report(pending=0, room=4, available=0))
        assert refusals.believed("ap", ROOM, now_s) is ROOM


@given(st.integers(2, 300), st.integers(1, 8))
def test_who_refuses_each_time_is_asked_less_and_less(ticks, at_once):
    """It says every 100 ms that it has room."""
    refusals, asked = Refusals(), 0
    for tick in range(ticks):
        now_s = tick / 10
        if refusals.believed("eu", ROOM, now_s).available:
            asked += 1
            for _ in range(at_once):
                refusals.refused("eu", now_s)
    assert asked <= 7 + ticks / 10 / MAX_S
    assert refusals.believed("eu", ROOM, ticks / 10 + MAX_S) is ROOM
