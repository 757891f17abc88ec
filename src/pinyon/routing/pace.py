"""How long it takes until the next of those who wait goes on."""

from __future__ import annotations

_SMOOTHING = 0.1


class Pace:
    """The mean time between two that go on, while others wait. Some that go at the same moment share the time since
    the moment before: room is found at once for many."""

    def __init__(self) -> None:
        self._gap_s = 0.0
        """0: not known."""
        self._last_s = 0.0
        self._together = 0
        """How many went on at ``_last_s``; 0: nobody has since there is a queue."""

    def went_on(self, now_s: float) -> None:
        if self._together and now_s > self._last_s:
            self._gap_s = self._with(now_s)
            self._together = 0
        if not self._together:
            self._last_s = now_s
        self._together += 1

    def came_back(self) -> None:
        """Of those who went on, one did not get far."""
        if self._together > 1:
            self._together -= 1

    def stopped(self) -> None:
        """Nobody waits."""
        self._together = 0

    def gap_s(self, now_s: float | None = None) -> float:
        """Seconds. With ``now_s``: nobody may have gone for a while, so it is at least what it were if one went now."""
        if now_s is None or not self._together:
            return self._gap_s
        return max(self._gap_s, self._with(now_s))

    def _with(self, now_s: float) -> float:
        gap_s = max(0.0, now_s - self._last_s) / self._together
        weight = 1.0 - (1.0 - _SMOOTHING) ** self._together
        return self._gap_s + weight * (gap_s - self._gap_s) if self._gap_s else gap_s
