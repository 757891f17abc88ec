"""Bounds on what the server holds for clients, for one client and in total, with a fair share for each holder."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Limits on what one HTTP client can make the server hold, and for how long: sizes in bytes, times in seconds."""

    line_bytes: int = 8 << 10
    """The maximum size of the request line (method, target, version). A longer line is answered with 414."""
    head_bytes: int = 32 << 10
    """The maximum size of request line and header fields together. A larger head is answered with 431."""
    head_fields: int = 100
    body_bytes: int = 4 << 20
    """The maximum size of a body. A larger body is answered with 413."""
    head_s: float = 10.0
    """The maximum time from a head's first byte to its last. A slower head is answered with 408."""
    arrival_s: float = 30.0
    """The maximum time from a request's first byte to its last. A slower request is answered with 408."""
    idle_s: float = 75.0
    """The maximum time from an answer to the next request."""
    write_stall_s: float = 30.0
    """The maximum time for which a client may read nothing of an answer that waits for it."""
    connections: int = 4096


class Budget:
    """A budget of a resource (bytes, places) for one event loop; ``used`` never exceeds ``total``.

    A named holder may hold no more than it leaves free. Alone, it gets at most half of the budget, and two that grow
    alike get a third each. So there is always room for the next holder."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._held: dict[str, int] = {}
        self.used = 0

    def take(self, size: int, name: str = "") -> bool:
        """Takes ``size`` more and returns True, or returns False if there is no room; a negative size always fits."""
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
    """The part of a budget that one connection holds, in the name of the client that it serves."""

    __slots__ = ("_budget", "_name", "_size")

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._name = ""
        self._size = 0

    def hold(self, size: int) -> bool:
        """Changes the held amount to ``size``; returns False, with nothing changed, if there is no room."""
        if size != self._size:
            if not self._budget.take(size - self._size, self._name):
                return False
            self._size = size
        return True

    def rename(self, name: str) -> None:
        """Gives back what is held and attributes later :meth:`hold` calls to another name."""
        if name != self._name:
            self.hold(0)
            self._name = name
