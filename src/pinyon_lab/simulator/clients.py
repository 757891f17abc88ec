"""Clients, which decide when each request of a trace is sent."""

from __future__ import annotations

from collections.abc import Sequence

from pinyon_lab.simulator.workload import Arrival


class Clients:
    """The clients of a trace, in an open loop (``count`` is 0: requests are sent at the trace's times) or a closed one.

    In a closed loop each of ``count`` clients sends the trace's next request as soon as its last one has ended,
    whatever the times. In both, no client sends the next turn of a conversation before the last turn has ended."""

    def __init__(self, arrivals: Sequence[Arrival], count: int = 0) -> None:
        self._arrivals = arrivals
        self._count = count
        self._next = 0
        self._ended = bytearray(len(arrivals))
        self._followers: dict[int, list[int]] = {}
        for number, arrival in enumerate(arrivals):
            if arrival.follows >= number:
                raise ValueError(f"request {number} follows {arrival.follows}, which does not come before it")
            if arrival.follows >= 0:
                self._followers.setdefault(arrival.follows, []).append(number)
        self._held: set[int] = set()
        """The requests that are due, but follow a request that has not ended."""

    def first(self) -> list[tuple[float, int]]:
        """Returns ``(time, request)`` of the requests that depend on no other."""
        if self._count:
            return [(0.0, number) for number in self._take(self._count)]
        return [(each.time_s, number) for number, each in enumerate(self._arrivals) if each.follows < 0]

    def ended(self, number: int, now_s: float) -> list[tuple[float, int]]:
        """Returns ``(time, request)`` of the requests that are sent because this one has ended, in whatever way."""
        self._ended[number] = 1
        followers = self._followers.pop(number, ())
        if not self._count:
            return [(max(now_s, self._arrivals[each].time_s), each) for each in followers]
        free = [each for each in followers if each in self._held]
        self._held.difference_update(free)
        return [(now_s, each) for each in (*free, *self._take(1))]

    def _take(self, count: int) -> list[int]:
        """Returns what the next ``count`` clients send; a client whose request must await an end waits with it."""
        taken = []
        for number in range(self._next, min(self._next + count, len(self._arrivals))):
            follows = self._arrivals[number].follows
            if follows >= 0 and not self._ended[follows]:
                self._held.add(number)
            else:
                taken.append(number)
        self._next = min(self._next + count, len(self._arrivals))
        return taken
