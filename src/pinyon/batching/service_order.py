"""Whose prompt is computed next, of those that wait at an instance."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from pinyon.core.policies import NoSettings, Registry

__all__ = ["SERVICE_ORDERS", "Fifo", "ServiceOrder", "ShortestInTime", "ShortestInTimeSettings"]

Waiting = TypeVar("Waiting")
What = TypeVar("What")
STALE_MAX = 64


class ServiceOrder(Protocol[Waiting]):
    """Prompts that wait. Each is there once."""

    def add(self, waiting: Waiting, now_s: float, seconds: float, deadline_s: float) -> None:
        """It came; computing it takes about so many ``seconds``, and its first token should be there at
        ``deadline_s``."""

    def next(self, now_s: float) -> Waiting | None:
        """Its turn; it does not wait any more. None: nobody does."""

    def remove(self, waiting: Waiting) -> None:
        """It does not wait any more."""

    def __iter__(self) -> Iterator[Waiting]:
        """As they came."""

    def __len__(self) -> int: ...


class _Arrived(Generic[Waiting, What]):
    """Who waits, as they came, with what is to be known of them."""

    def __init__(self) -> None:
        self._all: dict[Waiting, What] = {}

    def remove(self, waiting: Waiting) -> None:
        del self._all[waiting]

    def __iter__(self) -> Iterator[Waiting]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)


class Fifo(_Arrived[Waiting, None]):
    """As they came."""

    name = "fifo"

    def add(self, waiting: Waiting, now_s: float, seconds: float, deadline_s: float) -> None:
        self._all[waiting] = None

    def next(self, now_s: float) -> Waiting | None:
        first = next(iter(self._all), None)
        if first is not None:
            del self._all[first]
        return first


@dataclass(frozen=True, slots=True)
class ShortestInTimeSettings:
    """Who has waited ``age_s`` longer than its SLO goes before all others, so that nobody starves."""

    age_s: float = 10.0

    def __post_init__(self) -> None:
        if not 0 <= self.age_s <= 1e6:
            raise ValueError(f"age_s must be from 0 to 1e6, got {self.age_s}")


class ShortestInTime(_Arrived[Waiting, tuple[int, float, float]]):
    """The shortest of those whose first token can still be in time; then the others as they came. Who is late for long
    goes first."""

    name = "shortest_in_time"

    def __init__(self, settings: ShortestInTimeSettings = ShortestInTimeSettings()) -> None:
        """Of each: number, seconds, deadline."""
        super().__init__()
        self._age_s = settings.age_s
        self._short: list[tuple[float, int, Waiting]] = []
        """A heap; who is gone or was late when its turn came is in :attr:`_all` with another number, or not at all."""
        self._came = 0

    def add(self, waiting: Waiting, now_s: float, seconds: float, deadline_s: float) -> None:
        self._came += 1
        self._all[waiting] = self._came, seconds, deadline_s
        heapq.heappush(self._short, (seconds, self._came, waiting))

    def next(self, now_s: float) -> Waiting | None:
        if not self._all:
            self._short.clear()
            return None
        if len(self._short) > 2 * len(self._all) + STALE_MAX:
            self._short = [(each[1], each[0], waiting) for waiting, each in self._all.items()]
            heapq.heapify(self._short)
        first = next(iter(self._all))
        if now_s - self._all[first][2] <= self._age_s:
            first = self._shortest(now_s) or first
        del self._all[first]
        return first

    def _shortest(self, now_s: float) -> Waiting | None:
        while self._short:
            seconds, number, waiting = heapq.heappop(self._short)
            known = self._all.get(waiting)
            if known is not None and known[0] == number and now_s + seconds <= known[2]:
                return waiting
        return None


SERVICE_ORDERS: Registry[ServiceOrder[object]] = Registry(
    "service order",
    {
        Fifo.name: (NoSettings, lambda _: Fifo()),
        ShortestInTime.name: (ShortestInTimeSettings, ShortestInTime),
    },
)
