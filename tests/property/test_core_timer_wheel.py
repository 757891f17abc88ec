"""The wheel of time limits against a list that is searched."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pinyon.core.timer_wheel import TimerWheel
from tests.long import usually

TIMES = st.one_of(st.integers(0, 40).map(lambda number: number * 0.25), st.floats(0, 10))


class WheelMachine(RuleBasedStateMachine):
    @initialize(tick_s=st.sampled_from((0.25, 1.0, 0.1)), now_s=TIMES)
    def begin(self, tick_s: float, now_s: float) -> None:
        self.wheel: TimerWheel[int] = TimerWheel(tick_s)
        self.tick_s, self.now_s = tick_s, now_s
        self.waiting: dict[int, tuple[float, int]] = {}
        self.last = 0

    @rule(after_s=TIMES)
    def add(self, after_s: float) -> None:
        self.last += 1
        due_s = self.now_s + after_s
        self.waiting[self.last] = due_s, self.wheel.add(self.last, due_s)

    @rule(place=st.integers(0, 100))
    def remove(self, place: int) -> None:
        if self.waiting:
            entry = list(self.waiting)[place % len(self.waiting)]
            _, slot = self.waiting.pop(entry)
            self.wheel.remove(entry, slot)
            self.wheel.remove(entry, slot)  # removing it again has no effect

    @rule(passed_s=TIMES)
    def turn(self, passed_s: float) -> None:
        self.now_s += passed_s
        over = self.wheel.turn(self.now_s)
        assert len(over) == len(set(over))
        for entry in over:
            due_s, _ = self.waiting.pop(entry)  # fails if it was not waiting
            assert due_s <= self.now_s, "it is early"
        late_s = self.now_s - self.tick_s - 1e-9
        assert all(due_s > late_s for due_s, _ in self.waiting.values()), "it is a tick late"

    @invariant()
    def same(self) -> None:
        assert bool(self.wheel) == bool(self.waiting)
        if self.waiting:
            assert self.wheel.first == min(slot for _, slot in self.waiting.values())


TestWheel = WheelMachine.TestCase
TestWheel.settings = settings(max_examples=usually(20, long=100), stateful_step_count=40, deadline=None)


def test_what_is_over_comes_by_its_time() -> None:
    wheel: TimerWheel[str] = TimerWheel(1.0)
    for name, due_s in (("c", 3.5), ("a", 0.5), ("b", 1.5)):
        wheel.add(name, due_s)
    assert wheel.turn(0.9) == []
    assert wheel.turn(10.0) == ["a", "b", "c"]
    assert not wheel


@pytest.mark.parametrize("tick_s", [0.0, -1.0, float("nan")])
def test_a_tick_takes_some_time(tick_s: float) -> None:
    with pytest.raises(ValueError, match="tick"):
        TimerWheel(tick_s)
