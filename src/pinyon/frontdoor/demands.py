"""What requests may go to, by numbers for the queue, and the places that are kept for them."""

from __future__ import annotations

from collections.abc import Callable, Collection

from pinyon.core.errors import ResourceExhausted
from pinyon.routing.layer import Layer
from pinyon.routing.target_policy import Routed
from pinyon.routing.two_layers import Route

_ANYWHERE = Route(Routed(), exclude=frozenset())
DEMANDS_MAX = 4096
WAITING_DEMANDS_MAX = 256
"""Different ones that may be waited with before clients' own choices of regions make no further ones: each is looked at
whenever there may be room."""


class Hold:
    """A place at some target of a layer, of a request whose target is not known yet. To be released once."""

    __slots__ = ("_layer",)

    def __init__(self, layer: Layer) -> None:
        self._layer: Layer | None = layer
        layer.hold()

    def release(self) -> None:
        """Calling it again is fine."""
        if self._layer is not None:
            layer, self._layer = self._layer, None
            layer.release()


class Demands:
    """Numbers of what requests may go to, for the queue: the same for all that may go to the same. ``waiting`` says
    which of them somebody waits with; of others some are forgotten."""

    def __init__(self, waiting: Callable[[], Collection[int]]) -> None:
        self._waiting = waiting
        self._by_number: dict[int, tuple[str, Route]] = {}
        self._numbers: dict[tuple[str, frozenset[str], str, Collection[str]], int] = {}
        self._last = 0
        self._plain: dict[str, int] = {}
        """Of requests that may go wherever their model is served, by its name."""

    def plain(self, model: str, regions: frozenset[str]) -> int:
        """Of a request that names no regions, has come from none and excludes nobody; see :meth:`number`."""
        number = self._plain.get(model)
        if number is None:
            self._plain[model] = number = self.number(model, regions, _ANYWHERE)
        return number

    def number(self, model: str, regions: frozenset[str], route: Route) -> int:
        """``regions`` are those that it may be served in, as far as law and contracts go; ``route`` speaks for all that
        may be served there, and excludes (hashable) who will not do so. Raises :class:`ResourceExhausted` where a
        choice of regions that nobody waits for would be one too many.
        """
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

    def get(self, number: int) -> tuple[str, Route] | None:
        """Its model, and a route that goes where it may."""
        return self._by_number.get(number)

    def renumber(self) -> None:
        """Other regions are known: who waits with an old number is told where it may go by the first who had it, and
        might miss a new one."""
        self._numbers.clear()
        self._plain.clear()

    def _forget(self) -> None:
        waiting = self._waiting()
        self._by_number = {number: known for number, known in self._by_number.items() if number in waiting}
        self._numbers = {name: number for name, number in self._numbers.items() if number in waiting}
        self._plain.clear()
