"""The number of requests that a server takes at once, learned from refusals where the server does not say.

The value begins with a guess. A refusal (429, 503) shrinks it by a quarter. Each time it was used up and everybody got
an answer, it grows by one: additive increase, multiplicative decrease.
"""

from __future__ import annotations

from typing import Final

CAPACITY_GUESS: Final = 32
CAPACITY_MAX: Final = 1024
_SHRINK: Final = 0.75


class LearnedCapacity:
    """The capacity of one server, in requests. Owned by one thread."""

    __slots__ = ("_served", "value")

    def __init__(self, guess: int = CAPACITY_GUESS) -> None:
        if not 1 <= guess <= CAPACITY_MAX:
            raise ValueError(f"a capacity is from 1 to {CAPACITY_MAX}")
        self.value = guess
        self._served = 0

    def refused(self, outstanding: int) -> bool:
        """Records a refusal among ``outstanding`` requests, itself included. Returns whether the value changed."""
        self._served = 0
        value = max(1, int(min(self.value, outstanding) * _SHRINK))
        changed, self.value = value != self.value, value
        return changed

    def served(self, outstanding: int) -> bool:
        """Records a good end among ``outstanding`` requests, itself included. Returns whether the value changed."""
        if outstanding < self.value or self.value >= CAPACITY_MAX:
            return False
        self._served += 1
        if self._served < self.value:
            return False
        self._served = 0
        self.value += 1
        return True
