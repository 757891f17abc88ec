"""The sets of targets that requests may go to, numbered for the queue."""

from __future__ import annotations

from collections.abc import Callable, Collection

from pinyon.core.errors import ResourceExhausted
from pinyon.routing.target import Routed
from pinyon.routing.two_layers import RoutedRequest

_ANYWHERE = RoutedRequest(Routed(), exclude=frozenset())
DEMANDS_MAX = 4096
WAITING_DEMANDS_MAX = 256
"""The number of different demands that may wait before further choices of regions by clients are refused. Each is
checked whenever there may be room."""


class Demands:
    """The demands: numbers for the sets of targets that requests may go to, equal for equal sets. ``waiting`` returns
    those that requests wait with; some of the others are forgotten."""

    def __init__(self, waiting: Callable[[], Collection[int]]) -> None:
        self._waiting = waiting
        self._by_number: dict[int, tuple[str, RoutedRequest]] = {}
        self._numbers: dict[str | tuple[str, frozenset[str], str, Collection[str]], int] = {}
        """The numbers of sets; for requests that may go wherever their model is served, also by the model's name."""
        self._last = 0

    def plain(self, model: str, regions: frozenset[str]) -> int:
        """Returns the demand of requests without regions, sender and exclusions; see :meth:`number`."""
        number = self._numbers.get(model)
        if number is None:
            self._numbers[model] = number = self.number(model, regions, _ANYWHERE)
        return number

    def number(self, model: str, regions: frozenset[str], route: RoutedRequest) -> int:
        """Returns the demand of requests that law and contracts allow in ``regions``. ``route`` stands for all of them,
        and its ``exclude`` (hashable) names targets to avoid. Raises :class:`ResourceExhausted` for a new choice of
        regions when too many wait."""
        name = model, regions, route.sender, route.exclude
        number = self._numbers.get(name)
        if route.geographies and len(waiting := self._waiting()) >= WAITING_DEMANDS_MAX and number not in waiting:
            raise ResourceExhausted(
                "Too many different choices of regions wait for room. Please try again later.", retry_after_s=1.0
            )
        if number is None:
            if len(self._by_number) >= DEMANDS_MAX:
                self._forget()
            self._last = number = self._last + 1
            self._numbers[name] = number
            self._by_number[number] = model, route
        return number

    def get(self, number: int) -> tuple[str, RoutedRequest] | None:
        """Returns the model of a demand and a route that represents its requests."""
        return self._by_number.get(number)

    def renumber(self) -> None:
        """Numbers demands anew from now on, as the known regions have changed. Waiting requests keep their old numbers,
        by which they might miss a new region."""
        self._numbers.clear()

    def _forget(self) -> None:
        waiting = self._waiting()
        self._by_number = {number: known for number, known in self._by_number.items() if number in waiting}
        self._numbers = {name: number for name, number in self._numbers.items() if number in waiting}
