"""Room for requests in the two layers of a model: whether there is some for whom, and what others are told of it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from pinyon.core.errors import ResourceExhausted
from pinyon.routing.layer import Layer
from pinyon.routing.pushing import PUSHING_RULES, UNLIMITED, Pending
from pinyon.routing.target_policy import Routed
from pinyon.routing.two_layers import Route, TwoLayers

__all__ = ["Demands", "Hold", "Room", "anybody", "for_region", "has_room", "hold", "remote_pushing", "room_of"]

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


def has_room(two: TwoLayers, route: Route, now_s: float) -> bool:
    """Some target that may serve it."""
    here = two.geography.serves(two.region, route.geographies, route.tenant).allowed
    if (here and two.local.has_room(now_s, exclude=route.exclude)) or two.adopted_for(route, now_s):
        return True
    others = _others(two, route)
    return bool(others) and two.remote.has_room(now_s, others, route.exclude)


def hold(two: TwoLayers, route: Route, now_s: float) -> Hold | None:
    """A place at the layer that it will go to, until its target is known."""
    here = two.geography.serves(two.region, route.geographies, route.tenant).allowed
    if here and two.local.has_room(now_s, exclude=route.exclude):
        return Hold(two.local)
    if name := two.adopted_for(route, now_s):
        return Hold(two.adopted[name][1])
    others = _others(two, route)
    if others and two.remote.has_room(now_s, others, route.exclude):
        return Hold(two.remote)
    return None


def anybody(two: TwoLayers, route: Route) -> bool:
    """Somebody who may serve it is there, and may have room soon."""
    here, others = _may(two, route)
    layers = [layer for _, layer in two.adopted.values()]
    if here:
        layers.append(two.local)
    return any(
        target.live and target.batches and target.name not in route.exclude for layer in layers for target in layer
    ) or any(target.live for target in two.remote if target.name in others and target.name not in route.exclude)


def _may(two: TwoLayers, route: Route) -> tuple[bool, Collection[str]]:
    here = two.geography.serves(two.region, route.geographies, route.tenant).allowed
    return here, _others(two, route)


def _others(two: TwoLayers, route: Route) -> Collection[str]:
    return frozenset() if route.sender or not len(two.remote) else two.others_for(route)


def remote_pushing(choice: str) -> Pending:
    """Other regions are asked for what they have room for, whatever the rule is at home; only its settings count."""
    rule = PUSHING_RULES.make(choice)
    return rule if isinstance(rule, Pending) else Pending()


class Room(NamedTuple):
    """What another region is told of a model: targets, those with room, requests that run there, and how many further
    ones each of the load balancers may send that share what there is (None: nobody counts)."""

    targets: int
    available: int
    running: int
    share: int | None


def for_region(two: TwoLayers, region: str) -> list[Layer]:
    """What is served here for requests of another region, as far as law goes that speaks of all of them."""
    may = two.geography.may
    return [two.local, *(layer for of, layer in two.adopted.values() if may(region, of, (), "").allowed)]


def room_of(layers: Collection[Layer], now_s: float, sharing: int) -> Room:
    """``sharing`` load balancers may send."""
    there = [each for layer in layers for each in layer if each.batches and each.live and not each.draining]
    spare = min(UNLIMITED, sum(layer.spare(now_s) for layer in layers))
    share = None if spare >= UNLIMITED else max(1, spare // max(1, sharing)) if spare else 0
    running = sum(target.outstanding for target in there)
    return Room(len(there), sum(layer.with_room(now_s) for layer in layers), running, share)
