"""Deadlines, all with one timer of the event loop.

A timer of the loop for each deadline would take 6 to 10 µs to set and cancel, and hardly any is ever due."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf
from types import TracebackType
from typing import Final, Protocol

TICK_S: Final = 1 / 32
"""The seconds by which a deadline may be noticed late."""
_NEVER: Final = 1 << 60


class Wait(Protocol):
    """A wait with a deadline."""

    def is_over(self) -> None:
        """Ends the wait, as its time is up and its deadline is forgotten."""
        ...


class Deadlines:
    """The deadlines of one event loop, by its clock; see :func:`deadlines_of`.

    This is a hashed timing wheel (Varghese and Lauck, SOSP '87, scheme 6) whose slots are made when they are needed.
    Setting or removing a deadline is one dictionary operation, however many there are. No deadline is noticed early,
    nor more than ``TICK_S`` late."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._slots: dict[int, dict[Wait, None]] = {}
        """The waits by the number of the tick at which they are over."""
        self._timer: asyncio.TimerHandle | None = None
        self._fires = _NEVER
        """The slot for which the timer is set. It is only brought forward, as most deadlines are removed in time."""

    def add(self, wait: Wait, due_s: float) -> int:
        """Adds a wait that is over at ``due_s``; returns its slot for :meth:`remove`. It may be there only once."""
        slot = int(due_s // TICK_S) + 1
        waits = self._slots.get(slot)
        if waits is None:
            self._slots[slot] = {wait: None}
            if slot < self._fires:
                self._set(slot)
        else:
            waits[wait] = None
        return slot

    def remove(self, wait: Wait, slot: int) -> None:
        """Removes a wait that ended in time; does nothing if it is not there any more."""
        waits = self._slots.get(slot)
        if waits is not None:
            waits.pop(wait, None)
            if not waits:
                del self._slots[slot]

    def _set(self, slot: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._fires = slot
        self._timer = self.loop.call_at(slot * TICK_S, self._turn)

    def _turn(self) -> None:
        self._timer, self._fires = None, _NEVER
        now = int(self.loop.time() // TICK_S)
        over = sorted([slot for slot in self._slots if slot <= now])
        for wait in [wait for slot in over for wait in self._slots.pop(slot)]:
            try:
                wait.is_over()
            except Exception as error:  # the failure must not affect other waits
                self.loop.call_exception_handler({"message": f"the end of {wait!r} failed", "exception": error})
        if self._slots and (first := min(self._slots)) < self._fires:
            self._set(first)


_latest: Deadlines | None = None


def deadlines_of(loop: asyncio.AbstractEventLoop) -> Deadlines:
    """Returns the deadlines that all callers share on this loop. Loops that run in turn get new ones at each turn."""
    global _latest
    if _latest is None or _latest.loop is not loop:
        _latest = Deadlines(loop)
    return _latest


class Deadline:
    """A deadline that is put off again and again."""

    __slots__ = ("_deadlines", "_looked_at_s", "_missed", "_slot", "due")

    def __init__(self, loop: asyncio.AbstractEventLoop, missed: Callable[[], None]) -> None:
        self._deadlines = deadlines_of(loop)
        self._missed = missed
        self.due = self._looked_at_s = inf
        """The loop's time of the deadline; infinite if there is none. It may be put off directly."""
        self._slot = 0

    def set(self, due: float) -> None:
        """Sets the deadline, by the loop's clock; ``inf`` is none. ``missed`` is called when it comes."""
        self.due = due
        if due < self._looked_at_s:
            self._deadlines.remove(self, self._slot)
            self._looked_at_s = due
            self._slot = self._deadlines.add(self, due)

    def close(self) -> None:
        self.due = inf
        self._deadlines.remove(self, self._slot)
        self._missed = _nobody  # the owner's method would form a reference cycle

    def is_over(self) -> None:
        self._looked_at_s = inf
        due, self.due = self.due, inf
        if due > self._deadlines.loop.time():
            self.set(due)
        else:
            self._missed()


def _nobody() -> None:
    """Does nothing."""


class TimeLimit:
    """A context in which a task may spend ``seconds`` at most; ``inf`` is no limit.

    After that the task is cancelled, and :class:`TimeoutError` is raised, as by ``asyncio.timeout``."""

    __slots__ = ("_cancelling", "_deadlines", "_over", "_seconds", "_slot", "_task")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._deadlines: Deadlines | None = None
        self._over = False

    def __enter__(self) -> TimeLimit:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._cancelling = task.cancelling()
        if self._seconds < inf:
            loop = task.get_loop()
            deadlines = _latest  # checked without a call, as every request does this
            if deadlines is None or deadlines.loop is not loop:
                deadlines = deadlines_of(loop)
            self._deadlines = deadlines
            self._slot = deadlines.add(self, loop.time() + self._seconds)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._over:
            if self._deadlines is not None:
                self._deadlines.remove(self, self._slot)
        elif self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def is_over(self) -> None:
        """Cancels the task."""
        self._over = True
        self._task.cancel()
