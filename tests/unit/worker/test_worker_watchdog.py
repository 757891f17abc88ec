"""Tests of when a step counts as hanging."""

from __future__ import annotations

from services.worker.instance.watchdog import Watchdog, stacks


class Engine:
    def __init__(self) -> None:
        self.step: int | None = None
        self.hung: list[int] = []
        self.watchdog = Watchdog(lambda: self.step, 2.0, self.hung.append)

    def looks(self, count: int) -> None:
        for _ in range(count):
            self.watchdog.look()


LOOKS = 11
"""The first look sees the step, and after ten more 2 s have passed."""


def test_a_step_that_does_not_end_is_told_once() -> None:
    engine = Engine()
    engine.looks(20)
    engine.step = 1
    engine.looks(LOOKS - 1)
    assert engine.hung == []
    engine.looks(1)
    assert engine.hung == [1]
    engine.looks(50)
    assert engine.hung == [1]


def test_every_step_has_its_own_time() -> None:
    engine = Engine()
    for engine.step in range(5):
        engine.looks(LOOKS - 1)
    engine.step = None
    engine.looks(5)
    engine.step = 4
    engine.looks(LOOKS - 1)
    assert engine.hung == []
    engine.looks(1)
    assert engine.hung == [4]


def test_the_stacks_name_this_test() -> None:
    assert "test_the_stacks_name_this_test" in stacks()
