"""The models that are served, here or in other regions: where their requests may go, and which targets have room.

Sessions and watches report what they hear of servers and other load balancers. Values in, choices out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from math import inf
from typing import Final

from pinyon.core.avoidance import Avoidance
from pinyon.core.clock import Clock
from pinyon.core.errors import FailedPrecondition, InvalidArgument, ResourceExhausted, Unavailable
from pinyon.frontdoor.failures import shown_names, unknown_model
from pinyon.frontdoor.served_model import ServedModel
from pinyon.routing.geography import ANYWHERE, Geography
from pinyon.routing.layer import Layer
from pinyon.routing.policies import ROUTING_POLICIES
from pinyon.routing.prefix_tree import LongestPrefix
from pinyon.routing.pushing import PUSHING_RULES, Blind, remote_pushing
from pinyon.routing.target import Report, Routed, Target
from pinyon.routing.two_layers import Possible, RoutedRequest, RoutingChoice, TwoLayers, Where
from pinyon.routing.under_way import UnderWay

MODELS_MAX = 1024
MODEL_CHARS_MAX = 256
"""The maximum length of a model's name that another region reports."""
ANY_DEMAND = 0
"""The demand of every request while there is nothing to choose."""
DEMANDS_MAX = 4096
WAITING_DEMANDS_MAX = 256
"""The number of different demands that may wait before further choices of regions by clients are refused. Each is
checked whenever there may be room."""
REFUSED_FIRST_S: Final = 0.1
"""The first pause: as long as the next report takes anyway."""
REFUSED_MAX_S: Final = 3.2
_ANYWHERE = RoutedRequest(Routed(), exclude=frozenset())
_HERE = RoutingChoice(Where.LOCAL)
_WAIT = RoutingChoice(Where.WAIT)


class ServedModels:
    """The models of one load balancer, all on one event loop. The callback ``changed`` is called when there may be room
    for more requests; ``waiting`` returns the demands of the requests that wait."""

    def __init__(
        self,
        region: str,
        clock: Clock,
        *,
        geography: Geography = ANYWHERE,
        pushing: str = Blind.name,
        routing: str = "skywalker",
        wait_s: float = 0.0,
        own: Iterable[str] = (),
    ) -> None:
        """Sets the region's name. ``pushing`` and ``routing`` are choices of their registries. ``own`` are the models
        of our own instances, which a conductor places on. They are known before any instance serves them, and no others
        are served. Without ``own``, the models are those that servers list. ``wait_s`` is how long a model may be
        without a live server before waiting requests are told."""
        self.changed: Callable[[], None] = lambda: None
        self.waiting: Callable[[], Collection[int]] = lambda: ()
        self.told: Callable[[], bool] = lambda: True
        """Returns whether it is known which other load balancers exist."""
        self.region, self.geography = region, geography
        self.others: dict[str, str] = {}
        """The regions of other load balancers, by the load balancers' names."""
        self._adopted: dict[str, str] = {}
        """The regions of adopted clusters, by the clusters' names."""
        self._routing, self._pushing = routing, pushing
        self._clock = clock
        self._wait_s = inf  # requests for our own models wait for instances by themselves
        self.by_name: dict[str, ServedModel] = {}
        self._demands: dict[int, tuple[str, RoutedRequest]] = {}
        """The model of each demand, and a route that represents its requests."""
        self._numbers: dict[str | tuple[str, frozenset[str], str, Collection[str]], int] = {}
        """The demands by set of targets; for requests that may go wherever their model is served, also by its name."""
        self._last_demand = ANY_DEMAND
        self._regions = frozenset((self.region,))
        self._under_way = UnderWay()
        self._pauses = Avoidance(first_s=REFUSED_FIRST_S, max_s=REFUSED_MAX_S)
        """The pauses of load balancers that report room but refuse requests, until they are believed again. They report
        every 100 ms: without a pause, the first requests in line would go there and come back each time."""
        self._news: asyncio.Event | None = None
        """The event that :meth:`wait_news` waits for, if it does."""
        self._fixed = False
        own = tuple(own)
        self._own = frozenset(own)
        self.selective = True
        """True if requests may have to wait for room, or go elsewhere."""
        for name in own:
            self.add(name)
        self._fixed, self._wait_s = bool(self.by_name), wait_s
        self._look()

    # -- models

    def of(self, model: str) -> ServedModel:
        """Returns the model of that name; an empty name means the only one that is served here, or the only one at all.
        Raises :class:`NotFound`, :class:`InvalidArgument`, and :class:`Unavailable` while no model is known."""
        found = self.by_name.get(model)
        if found is not None:
            return found
        if not self.by_name:
            raise Unavailable("No server has said yet which models it serves.", retry_after_s=1.0)
        if model:
            raise unknown_model(model, self.by_name)
        here = [each for each in self.by_name.values() if any(map(len, each.own_layers()))]
        here = here or list(self.by_name.values())
        if len(here) == 1:
            return here[0]
        raise InvalidArgument(f"model must be given. Served here: {shown_names(self.by_name)}.", field="model")

    def add(self, name: str, *, announced: bool = False) -> ServedModel | None:
        """Returns the model of that name, new if it was unknown; None for one model too many, or none of our own. An
        instance with a server may have ``announced`` any other."""
        found = self.by_name.get(name)
        if found is None and announced and len(self.by_name) >= MODELS_MAX:
            for each in list(self.by_name):  # models of servers stay while there is room
                self.drop_unserved(each)
        if found is None and (announced or not self._fixed) and len(self.by_name) < MODELS_MAX:
            remote = Layer(remote_pushing(self._pushing), ROUTING_POLICIES.make(self._routing))
            layers = TwoLayers(self.region, self._own_layer(), remote, self.geography)
            for cluster, region in self._adopted.items():
                layers.adopted[cluster] = region, self._own_layer()
            found = self.by_name[name] = ServedModel(name, layers, self._wait_s)
        return found

    def _own_layer(self) -> Layer:
        return Layer(PUSHING_RULES.make(self._pushing), ROUTING_POLICIES.make(self._routing))

    def layer(self, model: str, cluster: str = "") -> Layer | None:
        """Returns the layer that serves the model in this region, or in an adopted cluster; None if there is none."""
        served = self.by_name.get(model)
        if served is None or not cluster:
            return None if served is None else served.layers.local
        adopted = served.layers.adopted.get(cluster)
        return None if adopted is None else adopted[1]

    def adopt(self, cluster: str, region: str) -> None:
        """Serves a cluster of another region from here from now on."""
        self._adopted[cluster] = region
        self._know_regions()
        for served in self.by_name.values():
            served.layers.adopted[cluster] = region, self._own_layer()

    def give_back(self, cluster: str) -> None:
        """Stops serving an adopted cluster."""
        del self._adopted[cluster]
        self._know_regions()
        for name, served in list(self.by_name.items()):
            del served.layers.adopted[cluster]
            self.drop_unserved(name)
            served.look()
        self.tell()

    def drop_unserved(self, name: str) -> None:
        """Forgets a model that no target serves any more, unless it is one of our own."""
        served = self.by_name.get(name)
        if served is not None and name not in self._own and not any(served.targets()):
            del self.by_name[name]
            served.close()

    def set_by_servers(self, served: ServedModel, by_servers: bool) -> None:
        """Sets whether servers of instances serve a model. Other regions do not take part in that."""
        if by_servers and not served.by_servers:
            for target in served.layers.remote:
                target.live = False
        served.by_servers = by_servers

    def check_own(self, name: str) -> None:
        """Raises :class:`FailedPrecondition` for a model that servers of instances serve, whose requests are HTTP."""
        served = self.by_name.get(name)
        if served is not None and served.by_servers:
            raise FailedPrecondition(
                f"The model '{name}' is served by OpenAI-compatible servers of this region: ask for it over HTTP.",
                field="model",
            )

    def close(self) -> None:
        for served in self.by_name.values():
            served.close()

    def use(self, *, pushing: str = "", routing: str = "", geography: Geography | None = None) -> None:
        """Changes the rules that decide from now on; with other ``routing``, what was sent before is forgotten. Raises
        ``ValueError`` for an unknown choice."""
        if routing:
            ROUTING_POLICIES.checked(routing)
        if pushing:
            PUSHING_RULES.checked(pushing)
        self._pushing, self._routing = pushing or self._pushing, routing or self._routing
        self.geography = self.geography if geography is None else geography
        for served in self.by_name.values():
            layers = served.layers
            layers.geography = self.geography
            for layer in (*served.own_layers(), layers.remote):
                if pushing:
                    layer.use(pushing=(remote_pushing if layer is layers.remote else PUSHING_RULES.make)(pushing))
                if routing:
                    layer.use(policy=ROUTING_POLICIES.make(routing))
        self._look()
        self.tell()

    def _look(self) -> None:
        """Sets whether there is anything to choose; called after any change to what that depends on."""
        several = bool(self.others) or bool(self._adopted)
        self.selective = not self._fixed or several or not self._pushing.startswith(Blind.name)

    # -- reports about other regions

    def heard(self, name: str, region: str, models: Mapping[str, Report], distance_s: float, *, draining: bool) -> None:
        """Records another load balancer's state: a report for each model that it serves. It serves no others."""
        if self.others.get(name) != region:
            self.expect(name, region)
        now_s = self._clock()
        paused = self._pauses.avoids(name, now_s)
        unseen = self._under_way.told(name, max([report.received for report in models.values()], default=0))
        for served in list(self.by_name.values()):
            if served.name not in models and served.layers.remote.get(name) is not None:
                if self._fixed:  # it may soon have instances again, which still cache what they were sent
                    served.layers.remote.set_live(name, False)
                else:
                    self._leaves(served, name)
        for model, report in models.items():
            served_there = self.add(model) if 0 < len(model) <= MODEL_CHARS_MAX else None
            if served_there is None or served_there.by_servers:
                continue
            remote = served_there.layers.remote
            known = remote.get(name)
            if known is None or known.region != region:
                remote.join(name, region=region)
            remote.set_live(name, True)
            remote.set_draining(name, draining)
            remote.set_distance(name, distance_s)
            remote.report(name, replace(report, available=0) if paused else report, now_s, unseen.get(model, 0))
            served_there.look()
        self.tell()

    def _leaves(self, served: ServedModel, name: str) -> None:
        served.layers.remote.leave(name)
        served.look()
        self.drop_unserved(served.name)

    def expect(self, name: str, region: str) -> None:
        """Records a load balancer that belongs to us and has not been heard from yet."""
        self.others[name] = region
        self._know_regions()

    def away(self, name: str) -> None:
        """Records that a load balancer does not answer. When it is back, its targets may still hold our prefixes."""
        self._under_way.forget(name)
        for served in self.by_name.values():
            if served.layers.remote.get(name) is not None:
                served.layers.remote.set_live(name, False)
                served.layers.remote.begin_session(name)
                served.look()
        self.tell()

    def gone(self, name: str) -> None:
        """Forgets a load balancer that does not belong to us any more."""
        self._pauses.succeeded(name)
        self.others.pop(name, None)
        self._know_regions()
        self._under_way.forget(name)
        for served in list(self.by_name.values()):
            if served.layers.remote.get(name) is not None:
                self._leaves(served, name)
        self.tell()

    def refused(self, model: str, name: str) -> None:
        """Records that a load balancer refused a request although it had reported room. It counts as full until it
        reports room again and is believed again."""
        self._pauses.failed(name, self._clock())
        served = self.by_name.get(model)
        target = None if served is None else served.layers.remote.get(name)
        if served is not None and target is not None:
            served.layers.remote.report(name, replace(target.report, available=0), target.reported_s)

    def accepted(self, name: str, sent_s: float) -> None:
        """Records that a load balancer serves a request that was sent there at ``sent_s``."""
        self._pauses.succeeded(name, sent_s)

    def sent(self, served: ServedModel, routed: Routed, name: str) -> Target | None:
        """Counts a request that goes to another load balancer. Returns the target for :meth:`Layer.ended`."""
        self.under_way(served.name, name)
        return served.layers.remote.sent(routed, name)

    def under_way(self, model: str, name: str) -> None:
        """Counts a request that is on its way to another load balancer, whose report does not include it yet."""
        self._under_way.sent(name, model)

    def _know_regions(self) -> None:
        regions = frozenset((self.region, *self.others.values(), *self._adopted.values()))
        if regions != self._regions:
            self._regions = regions
            self._numbers.clear()  # requests that wait keep their demands, by which others might miss a new region
        self._look()

    # -- where a request goes

    def restricts(self, route: RoutedRequest) -> bool:
        """Returns whether law or contracts may forbid this region."""
        return bool(self.region and (route.geographies or self.geography.tenants))

    def choose(self, served: ServedModel, route: RoutedRequest) -> RoutingChoice:
        """Returns where a request goes now; the choice among our own instances is left open. Raises
        :class:`Unavailable` for a model that no target serves any more."""
        if not self.selective and not self.restricts(route):
            return _HERE
        choice = served.layers.choose(route, self._clock(), conducted=self._fixed)
        if choice.where is Where.NOWHERE and self.may_come(route):
            choice = _WAIT
        if choice.where is Where.WAIT and self.by_name.get(served.name) is not served:
            raise served.nobody()
        return choice

    def at_once(self, served: ServedModel, route: RoutedRequest) -> RoutingChoice | None:
        """Returns the region's server with room to which a request goes if its turn comes at once, else None. The
        choice is valid until anything else happens."""
        if self._fixed:
            return None
        layers, now_s = served.layers, self._clock()
        choice = layers.choose(route, now_s)
        # A request that may wait at the door of a full server is no sign of room.
        return choice if choice.where is Where.LOCAL and layers.local.takes(choice.target, now_s) else None

    def check_law(self, served: ServedModel, route: RoutedRequest) -> None:
        """Raises :class:`InvalidArgument` if no known region may serve the request."""
        if not self.restricts(route) or self.serves_here(route):
            return
        layers = served.layers
        if not (layers.others_for(route) or layers.adopted_by_law(route) or self.may_come(route)):
            raise self.forbidden(served, route)

    def forbidden(self, served: ServedModel, route: RoutedRequest) -> InvalidArgument:
        """Returns the error for a request that no known region may serve."""
        possible = served.layers.dry_run(RoutedRequest(Routed(), route.geographies, route.tenant), self._clock())
        reasons = "; ".join(sorted({each.reason for each in possible}))
        return InvalidArgument(f"No region that is known may serve this request: {reasons}.", field="geographies")

    def may_come(self, route: RoutedRequest) -> bool:
        """Returns whether a known region may serve the request later, or it is not known yet which regions exist."""
        if route.sender:
            return False
        return not self.told() or any(
            self.geography.may(self.region, region, route.geographies, route.tenant).allowed
            for region in self.others.values()
        )

    def serves_here(self, route: RoutedRequest) -> bool:
        """Returns whether law and contracts allow that the request is served in this region."""
        return self.geography.serves(self.region, route.geographies, route.tenant).allowed

    def elsewhere(self, served: ServedModel, route: RoutedRequest) -> str:
        """Returns another load balancer with room for a request that this region refused; empty if there is none."""
        if route.sender or not self.others:
            return ""
        allowed = served.layers.others_for(route)
        target = served.layers.remote.choose(route.routed, self._clock(), allowed, route.exclude) if allowed else None
        return "" if target is None else target.name

    def still_away(self, names: set[str]) -> set[str]:
        """Returns those of the named load balancers that do not answer."""
        if not names:
            return names
        there = {target.name for served in self.by_name.values() for target in served.layers.remote if target.live}
        return {name for name in names if name in self.others and name not in there}

    def dry_run(self, served: ServedModel, geographies: Collection[str], tenant: str) -> list[Possible]:
        """Returns for each region whether such a request could go there now, and why not."""
        return served.layers.dry_run(RoutedRequest(Routed(), geographies, tenant), self._clock())

    # -- the queue

    def demand(self, served: ServedModel, route: RoutedRequest) -> int:
        """Returns the number of the set of targets that the request may go to; equal sets have equal numbers. Raises
        :class:`ResourceExhausted` for a new choice of regions when too many wait."""
        geography, geographies = self.geography, route.geographies
        if not self.selective and not self.restricts(route):
            return ANY_DEMAND
        if not geographies and not route.sender and not route.exclude and route.tenant not in geography.tenants:
            number = self._numbers.get(served.name)
            if number is None:
                self._numbers[served.name] = number = self._number(served.name, self._regions, _ANYWHERE)
            return number
        tenant = route.tenant if route.tenant in geography.tenants else ""
        # Sets of targets are few, but clients can combine region names at will: so the number stands for the set.
        allowed = self._regions
        if geographies or tenant:
            allowed = frozenset(each for each in allowed if geography.serves(each, geographies, tenant).allowed)
        alike = RoutedRequest(Routed(), geographies, tenant, route.sender, frozenset(route.exclude))
        return self._number(served.name, allowed, alike)

    def _number(self, model: str, regions: frozenset[str], route: RoutedRequest) -> int:
        """Returns the demand of requests like ``route``, with hashable exclusions, which law and contracts allow in
        ``regions``."""
        name = model, regions, route.sender, route.exclude
        number = self._numbers.get(name)
        if route.geographies and len(waiting := self.waiting()) >= WAITING_DEMANDS_MAX and number not in waiting:
            raise ResourceExhausted(
                "Too many different choices of regions wait for room. Please try again later.", retry_after_s=1.0
            )
        if number is None:
            if len(self._demands) >= DEMANDS_MAX:
                waiting = self.waiting()
                self._demands = {each: known for each, known in self._demands.items() if each in waiting}
                self._numbers = {key: each for key, each in self._numbers.items() if each in waiting}
            self._last_demand = number = self._last_demand + 1
            self._numbers[name] = number
            self._demands[number] = model, route
        return number

    def is_open(self, demand: int) -> bool:
        """Returns whether there is room for a demand, and also True if no room can come, which the request finds out
        itself. While no server of the model answers, the request waits, unless the model is one of our own."""
        waiting = self._waiting_for(demand)
        if waiting is None:
            return True  # a request that waits for a model that is gone must learn of it
        served, route = waiting
        if served.layers.with_room(route, self._clock()) is not None:
            return True
        return not served.layers.anybody(route) and (self._fixed or served.live or bool(route.sender))

    def granted(self, demand: int) -> Layer | None:
        """Holds a place for a request whose turn has come, until its target is known and the caller releases it."""
        waiting = self._waiting_for(demand)
        layer = None if waiting is None else waiting[0].layers.with_room(waiting[1], self._clock())
        if layer is not None:
            layer.hold()
        return layer

    def _waiting_for(self, demand: int) -> tuple[ServedModel, RoutedRequest] | None:
        """Returns the model and a route of requests with that demand; None if the demand limits nothing any more."""
        known = self._demands.get(demand) if self.selective else None
        served = None if known is None else self.by_name.get(known[0])
        return None if known is None or served is None else (served, known[1])

    async def wait_news(self, seconds: float) -> None:
        """Waits until there may be room for more requests, at most so many seconds."""
        if self._news is None:
            self._news = asyncio.Event()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._news.wait()

    def tell(self) -> None:
        """Announces that there may be room for more requests."""
        self.changed()
        if self._news is not None:
            news, self._news = self._news, None
            news.set()

    # -- what others are told

    def instances(self) -> Iterator[tuple[Target, bool]]:
        """Yields each target that serves requests from here, once per model, and whether it has room."""
        now_s = self._clock()
        for served in self.by_name.values():
            for layer in served.own_layers():
                available = {target.name for target in layer.available(now_s)}
                for target in layer:
                    yield target, target.name in available

    def hits(self) -> tuple[int, int]:
        """Returns the prompt chunks that targets had been sent before, and all; zeros with another policy."""
        policies = [layer.policy for served in self.by_name.values() for layer in served.own_layers()]
        counted = [(each.hit_chunks, each.asked_chunks) for each in policies if isinstance(each, LongestPrefix)]
        return sum(hit for hit, _ in counted), sum(asked for _, asked in counted)

    def serves_elsewhere(self, model: str) -> bool:
        """Returns whether other regions have instances of the model, or this region serves it for another one."""
        layers = self.by_name[model].layers
        return any(target.live and not target.draining for target in layers.remote) or any(
            target.live for _, layer in layers.adopted.values() for target in layer if target.batches
        )
