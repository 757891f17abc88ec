"""One bound for what all clients together hold of something, bytes or places, and how much of it is one's."""

from __future__ import annotations


class Budget:
    """All on one event loop. ``used`` never exceeds ``total``.

    Nobody who has a name holds more than what he leaves free: one alone has half of it at most, of two each has a
    third, and there is always something for the next one.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._held: dict[str, int] = {}
        self.used = 0

    def take(self, size: int, name: str = "") -> bool:
        """Whether there is room for ``size`` more (or less: negative sizes always fit)."""
        held = self._held.get(name, 0) + size
        if size > 0 and self.used + size + (held if name else 0) > self._total:
            return False
        self.used += size
        if held:
            self._held[name] = held
        else:
            self._held.pop(name, None)
        return True


class Share:
    """What one connection holds of a budget, in the name of whom it serves."""

    __slots__ = ("_budget", "_name", "_size")

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._name = ""
        self._size = 0

    def hold(self, size: int) -> bool:
        """From now on so much; False: there is no room for it, and all stays as it was."""
        if size != self._size:
            if not self._budget.take(size - self._size, self._name):
                return False
            self._size = size
        return True

    def rename(self, name: str) -> None:
        """It serves another one, for whom nothing is held until the next :meth:`hold`."""
        if name != self._name:
            self.hold(0)
            self._name = name
