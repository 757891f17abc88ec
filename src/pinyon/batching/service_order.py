"""Whose prompt is computed next, of those that wait at an instance."""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar, Generic, Protocol, TypeVar

from pinyon.core.policies import NoSettings, Registry

__all__ = ["SERVICE_ORDERS", "Fifo", "ServiceOrder", "ShortestInTime", "ShortestInTimeSettings"]

Waiting = TypeVar("Waiting")
What = TypeVar("What")


class ServiceOrder(Protocol[Waiting]):
    """Prompts that wait. Each is there once."""

    def add(self, waiting: Waiting, now_s: float, seconds: float, deadline_s: float) -> None:
        """It came; computing it takes about so many ``seconds``, and its first token should be there at
        ``deadline_s``."""

    def next(self, now_s: float) -> Waiting | None:
        """Its turn; it does not wait any more. None: nobody does."""

    def first(self, now_s: float, count: int) -> list[Waiting]:
        """Whose turns would come now, so many of them: what as many calls of :meth:`next` would say. All wait on."""

    def remove(self, waiting: Waiting) -> None:
        """It does not wait any more."""

    def __iter__(self) -> Iterator[Waiting]:
        """As they came."""

    def __len__(self) -> int: ...


class _Arrived(Generic[Waiting, What]):
    """Who waits, as they came, with what is to be known of them."""

    def __init__(self) -> None:
        self._all: OrderedDict[Waiting, What] = OrderedDict()  # a dict is slow to take from the front of

    def remove(self, waiting: Waiting) -> None:
        del self._all[waiting]

    def __iter__(self) -> Iterator[Waiting]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)


class Fifo(_Arrived[Waiting, None]):
    """As they came."""

    name: ClassVar[str] = "fifo"

    def add(self, waiting: Waiting, now_s: float, seconds: float, deadline_s: float) -> None:
        self._all[waiting] = None

    def next(self, now_s: float) -> Waiting | None:
        first = next(iter(self._all), None)
        if first is not None:
            del self._all[first]
        return first

    def first(self, now_s: float, count: int) -> list[Waiting]:
        return list(islice(self._all, count))


@dataclass(frozen=True, slots=True)
class ShortestInTimeSettings:
    """Who has waited ``age_s`` longer than its SLO goes before all others, so that nobody starves; of who names none,
    or a longer one, that is ``patience_s``."""

    age_s: float = 10.0
    patience_s: float = 60.0

    def __post_init__(self) -> None:
        for name in ("age_s", "patience_s"):
            if not 0 <= getattr(self, name) <= 1e6:
                raise ValueError(f"{name} must be from 0 to 1e6, got {getattr(self, name)}")


class ShortestInTime(_Arrived[Waiting, tuple[int, float, float, float]]):
    """The shortest of those whose first token can still be in time; then the others as they came. Who is late for long
    goes before all of them. Looks at everybody each time."""

    name: ClassVar[str] = "shortest_in_time"

    def __init__(self, settings: ShortestInTimeSettings = ShortestInTimeSettings()) -> None:
        """Of each: number, seconds, deadline, and from when on it is late."""
        super().__init__()
        self._age_s, self._patience_s = settings.age_s, settings.patience_s
        self._came = 0

    def add(self, waiting: Waiting, now_s: float, seconds: float, deadline_s: float) -> None:
        self._came += 1
        self._all[waiting] = self._came, seconds, deadline_s, min(deadline_s, now_s + self._patience_s)

    def next(self, now_s: float) -> Waiting | None:
        first = min(self._all, key=lambda each: self._rank(each, now_s), default=None)
        if first is not None:
            del self._all[first]
        return first

    def first(self, now_s: float, count: int) -> list[Waiting]:
        return heapq.nsmallest(count, self._all, key=lambda each: self._rank(each, now_s))

    def _rank(self, waiting: Waiting, now_s: float) -> tuple[float, int]:
        """The least first."""
        number, seconds, deadline_s, late_s = self._all[waiting]
        if now_s - late_s > self._age_s:
            return -1.0, number
        return seconds if now_s + seconds <= deadline_s else math.inf, number


SERVICE_ORDERS: Registry[ServiceOrder[object]] = Registry(
    "service order",
    {
        Fifo.name: (NoSettings, lambda _: Fifo()),
        ShortestInTime.name: (ShortestInTimeSettings, ShortestInTime),
    },
)
