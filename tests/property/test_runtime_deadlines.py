"""The deadlines of an event loop against a list that is searched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pinyon.runtime.deadlines import TICK_S, Deadlines
from tests.long import usually

TIMES = st.one_of(st.integers(0, 40).map(lambda number: number * TICK_S), st.floats(0, 2))


class Timer:
    def __init__(self, due_s: float, fires: Callable[[], None]) -> None:
        self.due_s, self.fires, self.cancelled = due_s, fires, False

    def cancel(self) -> None:
        self.cancelled = True


class Loop:
    """An event loop's clock and its timers."""

    def __init__(self, now_s: float) -> None:
        self.now_s = now_s
        self.timers: list[Timer] = []

    def time(self) -> float:
        return self.now_s

    def call_at(self, due_s: float, fires: Callable[[], None]) -> Timer:
        self.timers.append(Timer(due_s, fires))
        return self.timers[-1]

    @property
    def set(self) -> list[float]:
        self.timers = [timer for timer in self.timers if not timer.cancelled]
        return [timer.due_s for timer in self.timers]

    def go_on(self, seconds: float) -> None:
        self.now_s += seconds
        if self.set and self.timers[0].due_s <= self.now_s:
            self.timers.pop().fires()


class Wait:
    def __init__(self) -> None:
        self.over = 0

    def is_over(self) -> None:
        self.over += 1


class DeadlinesMachine(RuleBasedStateMachine):
    @initialize(now_s=TIMES)
    def begin(self, now_s: float) -> None:
        self.loop = Loop(now_s)
        loop: Any = self.loop
        self.deadlines = Deadlines(loop)
        self.waiting: dict[Wait, tuple[float, int]] = {}

    @rule(after_s=TIMES)
    def add(self, after_s: float) -> None:
        wait, due_s = Wait(), self.loop.now_s + after_s
        self.waiting[wait] = due_s, self.deadlines.add(wait, due_s)

    @rule(place=st.integers(0, 100))
    def remove(self, place: int) -> None:
        if self.waiting:
            wait = list(self.waiting)[place % len(self.waiting)]
            _, slot = self.waiting.pop(wait)
            self.deadlines.remove(wait, slot)
            self.deadlines.remove(wait, slot)  # removing it again has no effect

    @rule(passed_s=TIMES)
    def pass_time(self, passed_s: float) -> None:
        self.loop.go_on(passed_s)
        over = [wait for wait in self.waiting if wait.over]
        assert all(wait.over == 1 for wait in over)
        for wait in over:
            due_s, _ = self.waiting.pop(wait)
            assert due_s <= self.loop.now_s, "it is early"
        late_s = self.loop.now_s - TICK_S - 1e-9
        assert all(due_s > late_s for due_s, _ in self.waiting.values()), "it is a tick late"

    @invariant()
    def one_timer_is_set_in_time(self) -> None:
        due = self.loop.set
        assert len(due) <= 1
        if self.waiting:
            assert due[0] <= min(slot for _, slot in self.waiting.values()) * TICK_S


TestDeadlines = DeadlinesMachine.TestCase
TestDeadlines.settings = settings(max_examples=usually(20, long=100), stateful_step_count=40, deadline=None)


def test_what_is_over_comes_by_its_time() -> None:
    loop: Any = Loop(0.0)
    deadlines, over = Deadlines(loop), []

    class Named(Wait):
        def __init__(self, name: str) -> None:
            self.name = name

        def is_over(self) -> None:
            over.append(self.name)

    for name, due_s in (("c", 3.5), ("a", 0.5), ("b", 1.5)):
        deadlines.add(Named(name), due_s)
    loop.go_on(0.4)
    assert over == []
    loop.go_on(10.0)
    assert over == ["a", "b", "c"]
    assert loop.set == []
