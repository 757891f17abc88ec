"""All models that are served, here or in other regions: who has room for what, and who may serve whom."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress

from pinyon.core.clock import Clock
from pinyon.core.errors import InvalidArgument, NotFound, Unavailable
from pinyon.frontdoor.room import Demands, Hold, Room, anybody, for_region, has_room, hold, remote_pushing, room_of
from pinyon.frontdoor.upstreams.served import Served
from pinyon.frontdoor.ways_options import WaysOptions
from pinyon.routing.layer import Layer
from pinyon.routing.policies import ROUTING_POLICIES
from pinyon.routing.prefix_tree import PrefixTree
from pinyon.routing.pushing import PUSHING_RULES
from pinyon.routing.target import Target
from pinyon.routing.target_policy import Routed
from pinyon.routing.two_layers import Route, TwoLayers

__all__ = ["MODELS_MAX", "ServedModels"]

MODELS_MAX = 1024
SHOWN_MAX = 8


class ServedModels:
    """All on one event loop. ``changed`` is called when there may be room for more, and ``waiting`` says which demands
    somebody waits with."""

    def __init__(self, options: WaysOptions, clock: Clock, wait_s: float) -> None:
        """``wait_s``: so long may nobody who serves a model be there before those that wait are told."""
        self.changed: Callable[[], None] = _nobody
        self.waiting: Callable[[], Collection[int]] = lambda: ()
        self.told: Callable[[], bool] = lambda: True
        """Whether it is known which other load balancers there are."""
        self.region, self.geography = options.region, options.geography
        self.others: dict[str, str] = {}
        """Regions of other load balancers, by the names of these."""
        self._adopted: dict[str, str] = {}
        """Regions of clusters that are served for others."""
        self._routing, self._pushing = options.routing, options.pushing
        self._clock = clock
        self._wait_s = wait_s
        self._by_name: dict[str, Served] = {}
        self._demands = Demands(lambda: self.waiting())
        self._regions = frozenset((self.region,))
        self._news = asyncio.Event()

    @property
    def by_name(self) -> Mapping[str, Served]:
        return self._by_name

    def of(self, model: str) -> Served:
        """The one of that name; nothing is the only one that is served here, or that there is. Raises
        :class:`NotFound`, :class:`InvalidArgument`, and :class:`Unavailable` while no model is known."""
        found = self._by_name.get(model)
        if found is not None:
            return found
        if not self._by_name:
            raise Unavailable("No server has said yet which models it serves.", retry_after_s=1.0)
        names = list(self._by_name)
        shown = f"{', '.join(names[:SHOWN_MAX])}{', …' if len(names) > SHOWN_MAX else ''}"
        if not model:
            here = [name for name, each in self._by_name.items() if any(map(len, each.own_layers()))] or names
            if len(here) == 1:
                return self._by_name[here[0]]
            raise InvalidArgument(f"model must be given. Served here: {shown}.", field="model")
        raise NotFound(
            f"The model '{model[:128]}' does not exist or you do not have access to it. Served here: {shown}.",
            field="model",
        )

    def add(self, name: str) -> Served | None:
        """The one of that name, new if it was not there; None: there are too many."""
        found = self._by_name.get(name)
        if found is None and len(self._by_name) < MODELS_MAX:
            remote = Layer(remote_pushing(self._pushing), ROUTING_POLICIES.make(self._routing))
            layers = TwoLayers(self.region, self._servers(), remote, self.geography)
            for cluster, region in self._adopted.items():
                layers.adopted[cluster] = region, self._servers()
            found = self._by_name[name] = Served(name, layers, self._clock, self._wait_s)
        return found

    def _servers(self) -> Layer:
        return Layer(PUSHING_RULES.make(self._pushing), ROUTING_POLICIES.make(self._routing))

    def layer(self, model: str, cluster: str = "") -> Layer:
        """The servers of the region, or of a cluster of another one that is served from here. Raises ``KeyError``."""
        layers = self._by_name[model].layers
        return layers.adopted[cluster][1] if cluster else layers.local

    def adopt(self, cluster: str, region: str) -> None:
        """Servers of another region are served from here."""
        self._adopted[cluster] = region
        self._know_regions()
        for served in self._by_name.values():
            served.layers.adopted[cluster] = region, self._servers()

    def give_back(self, cluster: str) -> None:
        """They are not any more."""
        del self._adopted[cluster]
        self._know_regions()
        for name, served in list(self._by_name.items()):
            del served.layers.adopted[cluster]
            self.drop_unserved(name)
            served.look()
        self.tell()

    def drop_unserved(self, name: str) -> None:
        """If nobody serves it any more."""
        served = self._by_name.get(name)
        if served is not None and not any(served.targets()):
            del self._by_name[name]
            served.close()

    def close(self) -> None:
        for served in self._by_name.values():
            served.close()

    # -- policies

    def use_routing(self, choice: str) -> None:
        """Raises ``ValueError``. What was sent before is forgotten."""
        ROUTING_POLICIES.checked(choice)
        self._routing = choice
        for served in self._by_name.values():
            for layer in served.own_layers():
                layer.use(policy=ROUTING_POLICIES.make(choice))
            served.layers.remote.use(policy=ROUTING_POLICIES.make(choice))

    def use_pushing(self, choice: str) -> None:
        """Raises ``ValueError``."""
        rule, remote = PUSHING_RULES.make(choice), remote_pushing(choice)
        self._pushing = choice
        for served in self._by_name.values():
            for layer in served.own_layers():
                layer.use(pushing=rule)
            served.layers.remote.use(pushing=remote)
        self.tell()

    # -- the queue

    def demand(self, served: Served, route: Route) -> int:
        """The number of what it may go to; what the route excludes is not among that."""
        geography, geographies = self.geography, route.geographies
        if not geographies and not route.sender and not route.exclude and route.tenant not in geography.tenants:
            return self._demands.plain(served.name, self._regions)
        tenant = route.tenant if route.tenant in geography.tenants else ""
        if not geographies and not tenant:
            allowed = self._regions
        else:
            allowed = frozenset(
                region for region in self._regions if geography.serves(region, geographies, tenant).allowed
            )
        return self._demands.number(
            served.name, allowed, Route(Routed(), geographies, tenant, route.sender, frozenset(route.exclude))
        )

    def know(self, others: Mapping[str, str]) -> None:
        """These are the other load balancers, and their regions."""
        self.others = dict(others)
        self._know_regions()

    def _know_regions(self) -> None:
        regions = frozenset((self.region, *self.others.values(), *self._adopted.values()))
        if regions != self._regions:
            self._regions = regions
            self._demands.renumber()

    def is_open(self, demand: int) -> bool:
        """Whether there is room for it; also where none can come, which the request finds out for itself. While nobody
        serves its model at all, it waits."""
        known = self._demands.get(demand)
        served = None if known is None else self._by_name.get(known[0])
        if known is None or served is None:
            return True  # who waits for what is no more must learn of it
        route = known[1]
        if has_room(served.layers, route, self._clock()):
            return True
        return not anybody(served.layers, route) and (served.live or bool(route.sender))

    def granted(self, demand: int) -> Hold | None:
        """Its turn has come: a place is kept until it is known where it goes."""
        known = self._demands.get(demand)
        served = None if known is None else self._by_name.get(known[0])
        if known is None or served is None:
            return None
        return hold(served.layers, known[1], self._clock())

    def may_come(self, route: Route) -> bool:
        """Somebody who may serve it is known, and not heard yet; or nobody has said who there is."""
        if route.sender:
            return False
        return not self.told() or any(
            self.geography.may(self.region, region, route.geographies, route.tenant).allowed
            for region in self.others.values()
        )

    async def wait_news(self, seconds: float) -> None:
        """Until there may be room for more, or so long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._news.wait()

    def tell(self) -> None:
        """There may be room for more."""
        self.changed()
        news, self._news = self._news, asyncio.Event()
        news.set()

    # -- what others are told

    def rooms(self, sharing: int, region: str) -> Iterator[tuple[str, Room]]:
        """Of each model that is served here, what there is for each of ``sharing`` load balancers, and requests of that
        region."""
        now_s = self._clock()
        for name, served in self._by_name.items():
            layers = for_region(served.layers, region)
            if any(map(len, layers)):
                yield name, room_of(layers, now_s, sharing)

    def instances(self) -> Iterator[tuple[Target, bool]]:
        """Servers, for each of their models, and whether they have room."""
        now_s = self._clock()
        for served in self._by_name.values():
            for layer in served.own_layers():
                available = {target.name for target in layer.available(now_s)}
                for target in layer:
                    yield target, target.name in available

    def hits(self) -> tuple[int, int]:
        """Chunks of prompts that servers had been sent before, and chunks in all; zeros with another policy."""
        policies = [layer.policy for served in self._by_name.values() for layer in served.own_layers()]
        counted = [(each.hit_chunks, each.asked_chunks) for each in policies if isinstance(each, PrefixTree)]
        return sum(hit for hit, _ in counted), sum(asked for _, asked in counted)


def _nobody() -> None:
    """Nobody is told."""
