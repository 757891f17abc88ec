"""One bound for the bytes that all connections together hold."""

from __future__ import annotations

__all__ = ["ByteBudget"]


class ByteBudget:
    """All on one event loop. ``used`` never exceeds ``total``."""

    def __init__(self, total: int) -> None:
        self._total = total
        self.used = 0

    def take(self, size: int) -> bool:
        """Whether there is room for ``size`` more (or less: negative sizes always fit)."""
        if size > 0 and self.used + size > self._total:
            return False
        self.used += size
        return True
