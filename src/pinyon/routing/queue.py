"""The queue in front of everything: first come, first served, with a bound.

Requests are numbers, so what it was told can be written down and told again. FCFS asks nothing of the time; a policy
that knows deadlines will.
"""

from __future__ import annotations

from collections import OrderedDict

from pinyon.core.errors import ResourceExhausted

__all__ = ["RequestQueue"]

RETRY_AFTER_S = 1.0


class RequestQueue:
    """``slots`` requests are in flight at once, ``limit`` more wait."""

    def __init__(self, slots: int, limit: int) -> None:
        self._slots = slots
        self._limit = limit
        self._waiting: OrderedDict[int, float] = OrderedDict()  # number → since when
        self.in_flight = 0

    @property
    def queued(self) -> int:
        return len(self._waiting)

    def enter(self, number: int, now_s: float) -> bool:
        """Whether the request has a slot now; otherwise it waits. No two that wait have the same number.

        Raises :class:`ResourceExhausted` when the queue is full.
        """
        if self.in_flight < self._slots:  # then nobody waits: a slot that is left goes to the first in line
            self.in_flight += 1
            return True
        if len(self._waiting) >= self._limit:
            raise ResourceExhausted(
                f"The queue is full ({self._limit} requests). Please try again later.", retry_after_s=RETRY_AFTER_S
            )
        if number in self._waiting:
            raise ValueError(f"request {number} waits already")
        self._waiting[number] = now_s
        return False

    def leave(self, now_s: float) -> int | None:
        """A request gives its slot back: the number of the one that has it now, if one waited."""
        if not self.in_flight:
            raise ValueError("nobody has a slot")
        if self._waiting:
            return self._waiting.popitem(last=False)[0]
        self.in_flight -= 1
        return None

    def cancel(self, number: int, now_s: float) -> bool:
        """Whether the request was still waiting and is gone; if not, and it has a slot, it must :meth:`leave`."""
        return self._waiting.pop(number, None) is not None

    def check_integrity(self) -> None:
        """Raises :class:`AssertionError` if a bound is broken or somebody waits beside a free slot."""
        assert 0 <= self.in_flight <= self._slots, f"{self.in_flight} of {self._slots} slots are taken"
        assert len(self._waiting) <= self._limit, f"{len(self._waiting)} wait, at most {self._limit} may"
        assert not self._waiting or self.in_flight == self._slots, "somebody waits beside a free slot"
