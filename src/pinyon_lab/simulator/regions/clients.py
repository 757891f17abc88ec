"""Clients of a closed loop (SkyWalker §5.1): each runs one program at a time, and begins the next when it has ended."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random

from pinyon_lab.simulator.regions.programs import Program, RegionProgramSource
from pinyon_lab.simulator.virtual_time import VirtualTime

Send = Callable[[str, Program, int, Callable[[bool], None]], None]
"""A function that sends a step, by region, program and index, and calls back once with whether it was answered."""
SPREAD_S = 5.0
"""The time within which clients begin, as not all begin at once."""
LOOK_S = 5.0
"""The interval at which an inactive client checks whether it should be active."""


@dataclass(eq=False, slots=True)
class _Running:
    program: Program
    open: int = 0
    """The number of steps that are sent or about to be."""


class RegionClients:
    """The clients of one region; ``wanted`` of ``most`` are active. None begins a program after :attr:`until_s`."""

    def __init__(
        self,
        time: VirtualTime,
        region: str,
        source: RegionProgramSource,
        rng: Random,
        most: int,
        wanted: Callable[[float], float],
        send: Send,
    ) -> None:
        self._time, self._region, self._source, self._rng = time, region, source, rng
        self._most, self._wanted, self.send = most, wanted, send
        self.until_s = math.inf
        self.programs = 0
        """The number of programs that have ended."""

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
        """Sends the steps that follow ``after``. All are counted first: no program ends while a step is left."""
        steps = running.program.steps
        due = [place for place in range(after + 1, len(steps)) if steps[place].after == after]
        running.open += len(due)
        for place in due:
            self.send(self._region, running.program, place, partial(self._ended, number, running, place))

    def _ended(self, number: int, running: _Running, place: int, answered: bool) -> None:
        """Sends what follows the step if it was answered, and begins a new program when this one is over."""
        if answered:
            self._follow(number, running, place)
        running.open -= 1
        if not running.open:
            self.programs += 1
            self._begin(number)
