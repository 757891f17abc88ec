"""Clients of a closed loop: each has one program under way at a time, and begins the next when all of it has ended
(SkyWalker §5.1)."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

from pinyon_lab.simulator.regions.programs import Program, Source
from pinyon_lab.simulator.virtual_time import VirtualTime

Send = Callable[[str, Program, int, Callable[[bool], None]], None]
"""A region, a program and the place of one of its steps; and who hears once whether that was answered."""
SPREAD_S = 5.0
"""Clients do not all begin at once."""
LOOK_S = 5.0
"""Until one that has nothing to do looks whether it has."""


class _Running:
    __slots__ = ("open", "program")

    def __init__(self, program: Program) -> None:
        self.program = program
        self.open = 0
        """Steps that are sent, or about to be."""


class Clients:
    """Of one region. ``wanted``: how many are to be active at a time, of ``most``; none begins a program after
    :attr:`until_s`."""

    def __init__(
        self,
        time: VirtualTime,
        region: str,
        source: Source,
        rng: Random,
        most: int,
        wanted: Callable[[float], float],
        send: Send,
    ) -> None:
        self._time, self._region, self._source, self._rng = time, region, source, rng
        self._most, self._wanted, self.send = most, wanted, send
        self.until_s = math.inf
        self.programs = 0
        """That have ended."""

    def start(self) -> None:
        for number in range(self._most):
            self._time.after(self._rng.random() * SPREAD_S, lambda number=number: self._begin(number))  # type: ignore[misc]

    def _begin(self, number: int) -> None:
        now_s = self._time.now_s
        if now_s >= self.until_s:
            return
        if number >= round(self._wanted(now_s)):
            self._time.after(LOOK_S, lambda: self._begin(number))
            return
        running = _Running(self._source.program(self._rng))
        self._follow(number, running, -1)

    def _follow(self, number: int, running: _Running, after: int) -> None:
        """What waits for that step; first it is counted, so that no program ends while something is left of it."""
        steps = running.program.steps
        due = [place for place in range(after + 1, len(steps)) if steps[place].after == after]
        running.open += len(due)
        for place in due:
            if steps[place].think_s:
                self._time.after(steps[place].think_s, lambda place=place: self._step(number, running, place))  # type: ignore[misc]
            else:
                self._step(number, running, place)

    def _step(self, number: int, running: _Running, place: int) -> None:
        self.send(self._region, running.program, place, lambda answered: self._ended(number, running, place, answered))

    def _ended(self, number: int, running: _Running, place: int, answered: bool) -> None:
        """What was not answered is followed by nothing."""
        if answered:
            self._follow(number, running, place)
        running.open -= 1
        if not running.open:
            self.programs += 1
            self._begin(number)
