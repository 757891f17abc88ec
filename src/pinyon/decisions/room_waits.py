"""How long requests wait for KV memory at an instance: what it reports to the conductor."""

from __future__ import annotations

__all__ = ["RoomWaits"]

WEIGHT = 0.2
"""Of the last one, in the mean of those that came through."""
FORGET_S = 60.0
"""What was so long ago tells nothing of who waits now."""


class RoomWaits:
    """Of those that came for the first time; who gave way and waits again is not counted."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}
        self._mean_s = self._told_s = 0.0

    def began(self, number: int, now_s: float) -> None:
        """It waits."""
        if not self._since and now_s - self._told_s > FORGET_S:
            self._mean_s = 0.0
        self._since[number] = now_s

    def granted(self, number: int, now_s: float) -> None:
        """It has its room, if it was counted."""
        since_s = self._since.pop(number, None)
        if since_s is not None:
            self._mean_s += (now_s - since_s - self._mean_s) * WEIGHT
            self._told_s = now_s

    def left(self, number: int) -> None:
        """It waits no more."""
        self._since.pop(number, None)

    def wait_s(self, now_s: float) -> float:
        """How long one that comes now waits, as far as those before it tell; 0 while nobody waits."""
        since_s = next(iter(list(self._since.values())), None)  # in one go: it is asked from other threads, too
        return 0.0 if since_s is None else max(now_s - since_s, self._mean_s)
