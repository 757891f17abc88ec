"""Where requests go from here: of each model the instances of the region and the load balancers of others, who is
available, and which law says no. Values in, choices out; the sessions to both tell it what they hear."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from pinyon.core.clock import Clock
from pinyon.frontdoor.instances.request import Ask, Request
from pinyon.frontdoor.room import Demands, Hold, Room, anybody, for_region, has_room, hold, remote_pushing, room_of
from pinyon.frontdoor.ways_options import WaysOptions
from pinyon.routing.geography import Geography
from pinyon.routing.layer import Layer
from pinyon.routing.policies import ROUTING_POLICIES
from pinyon.routing.prefix_tree import PrefixTree
from pinyon.routing.pushing import PUSHING_RULES, Blind
from pinyon.routing.refusals import Refusals
from pinyon.routing.routing_keys import keys_of_blocks, routing_root, token_keys
from pinyon.routing.target import UNKNOWN, Report, Target
from pinyon.routing.target_policy import Routed
from pinyon.routing.two_layers import Choice, Possible, Route, TwoLayers, Where
from pinyon.routing.under_way import UnderWay

__all__ = ["Ways"]

ROOTS_MAX = 4096
ANY_DEMAND = 0
"""The number of all that may go to the same, while there is nothing to choose."""
_HERE = Choice(Where.LOCAL)


class Ways:
    """Of all models. Whenever there may be room for somebody who waits, :attr:`changed` is called."""

    def __init__(self, models: Iterable[str], options: WaysOptions, clock: Clock) -> None:
        self.region = options.region
        self.changed: Callable[[], None] = lambda: None
        self.waiting: Callable[[], Collection[int]] = lambda: ()
        """Demands that somebody waits with."""
        self.told: Callable[[], bool] = lambda: True
        """Whether it is known which other load balancers there are."""
        self._secret = options.secret
        self._clock = clock
        self._pushing, self._routing = options.pushing, options.routing
        self._by_model = {model: self._make(options.geography) for model in models}
        self._regions: dict[str, str] = {}
        """Of other load balancers, by name."""
        self.selective = False
        """Requests may have to wait for room, or go elsewhere."""
        self._under_way = UnderWay()
        self._refusals = Refusals()
        self._demands = Demands(lambda: self.waiting())
        self._numbered_for: frozenset[str] = frozenset()
        """Regions by which the numbers tell demands apart."""
        self._roots: dict[tuple[str, str, str], bytes] = {}
        self._look()

    def _make(self, geography: Geography) -> TwoLayers:
        local = self._local_layer()
        remote = Layer(remote_pushing(self._pushing), ROUTING_POLICIES.make(self._routing))
        return TwoLayers(self.region, local, remote, geography)

    def _local_layer(self) -> Layer:
        return Layer(PUSHING_RULES.make(self._pushing), ROUTING_POLICIES.make(self._routing))

    def use(self, *, pushing: str = "", routing: str = "", geography: Geography | None = None) -> None:
        """From now on these decide. Raises ``ValueError`` for a choice that there is not."""
        self._pushing, self._routing = pushing or self._pushing, routing or self._routing
        for two in self._by_model.values():
            for layer in (two.local, *(adopted for _, adopted in two.adopted.values())):
                if pushing:
                    layer.use(pushing=PUSHING_RULES.make(pushing))
                if routing:
                    layer.use(policy=ROUTING_POLICIES.make(routing))
            if pushing:
                two.remote.use(pushing=remote_pushing(pushing))
            if routing:
                two.remote.use(policy=ROUTING_POLICIES.make(routing))
            if geography is not None:
                two.geography = geography
        self._look()
        self.changed()

    def _look(self) -> None:
        """Whether there is anything to choose, after what that goes by has changed."""
        adopts = any(two.adopted for two in self._by_model.values())
        self.selective = bool(self._regions) or adopts or not self._pushing.startswith(Blind.name)

    @property
    def models(self) -> Collection[str]:
        return self._by_model.keys()

    def of(self, model: str) -> TwoLayers | None:
        return self._by_model.get(model)

    def local(self, model: str, cluster: str = "") -> Layer | None:
        """The instances of the region, or of a cluster of another one that is served from here."""
        two = self._by_model.get(model)
        if two is None:
            return None
        if not cluster:
            return two.local
        adopted = two.adopted.get(cluster)
        return None if adopted is None else adopted[1]

    def adopt(self, cluster: str, region: str) -> None:
        """Instances of another region are served from here."""
        for two in self._by_model.values():
            two.adopted[cluster] = region, self._local_layer()
        self._look()

    def give_back(self, cluster: str) -> None:
        """They are not any more."""
        for two in self._by_model.values():
            two.adopted.pop(cluster, None)
        self._look()

    @property
    def geography(self) -> Geography:
        return next(iter(self._by_model.values())).geography

    # -- what is heard of instances

    def load(self, cluster: str, model: str, instance_id: str, report: Report, unseen: int = UNKNOWN) -> None:
        """An instance's own word; ``unseen`` of our requests were on their way to it then."""
        layer = self.local(model, cluster)
        if layer is not None:
            layer.set_live(instance_id, True)
            layer.report(instance_id, report, self._clock(), unseen)
            self.changed()

    def silent(self, cluster: str, model: str, instance_id: str) -> None:
        """Its session has ended: it says nothing, and what it was sent there is lost."""
        layer = self.local(model, cluster)
        if layer is not None:
            layer.set_live(instance_id, False)
            layer.begin_session(instance_id)
            self.changed()

    # -- what is heard of other regions

    def heard(self, name: str, region: str, models: Mapping[str, Report], distance_s: float, *, draining: bool) -> None:
        """Another load balancer's state, of each model that it serves."""
        self.expect(name, region)
        now_s = self._clock()
        unseen = self._under_way.told(name, max([report.received for report in models.values()], default=0))
        for model, two in self._by_model.items():
            report, known = models.get(model), two.remote.get(name)
            if report is None:
                if known is not None:  # it may have some again soon, with what it was sent before
                    two.remote.set_live(name, False)
                continue
            if known is None or known.region != region:
                two.remote.join(name, region=region)
            two.remote.set_live(name, True)
            two.remote.set_draining(name, draining)
            two.remote.set_distance(name, distance_s)
            believed = self._refusals.believed(name, report, now_s)
            two.remote.report(name, believed, now_s, unseen.get(model, 0))
        self.changed()

    def expect(self, name: str, region: str) -> None:
        """It is one of ours, and has not been heard yet."""
        self._regions[name] = region
        self.selective = True

    def away(self, name: str) -> None:
        """It does not answer. Its instances may have what they were sent before all the same, when it is back."""
        self._under_way.forget(name)
        for two in self._by_model.values():
            two.remote.set_live(name, False)
            two.remote.begin_session(name)
        self.changed()

    def refused(self, request: Request, name: str) -> None:
        """It had no room for the request, whatever it said: it has none for anybody until it says so again, and is
        believed again."""
        self._refusals.refused(name, self._clock())
        remote = self._by_model[request.ask.model].remote
        target = remote.get(name)
        if target is not None:
            remote.report(name, replace(target.report, available=0), target.reported_s)

    def accepted(self, name: str, sent_s: float) -> None:
        """It serves what was sent there then."""
        self._refusals.accepted(name, sent_s)

    def gone(self, name: str) -> None:
        """It is no load balancer of ours any more."""
        self._refusals.gone(name)
        self._regions.pop(name, None)
        self._look()
        self._under_way.forget(name)
        for two in self._by_model.values():
            two.remote.leave(name)
        self.changed()

    def serves_elsewhere(self, model: str) -> bool:
        """Another region has instances of it, or they are served for another one from here."""
        two = self._by_model[model]
        return any(target.live and not target.draining for target in two.remote) or any(
            target.live for _, layer in two.adopted.values() for target in layer if target.batches
        )

    def states(self, model: str, sharing: int, region: str) -> Room:
        """What another region is told, one of ``sharing`` load balancers that may send."""
        return room_of(for_region(self._by_model[model], region), self._clock(), sharing)

    # -- requests

    def routed(self, request: Request) -> Routed:
        """What its target is chosen by. It is remembered of every request, whoever chooses, so it must cost little."""
        if request.routed is None:
            whose = request.ask.request_class
            key = whose.session or whose.user
            request.routed = Routed(self._keys(request.ask), f"{whose.tenant}/{key}" if key else "")
        return request.routed

    def _keys(self, ask: Ask) -> bytes:
        """Where a conductor chooses and there are no other regions, those that are made for it will do."""
        if not self.selective and ask.block_keys:
            return keys_of_blocks(ask.block_keys)
        whose = ask.request_class
        name = ask.model, whose.tenant, whose.cache_salt
        root = self._roots.get(name)
        if root is None:
            if len(self._roots) >= ROOTS_MAX:
                self._roots.clear()
            root = self._roots[name] = routing_root(ask.model, whose.tenant, self._secret, whose.cache_salt)
        return token_keys(root, ask.tokens_le32)

    def route(self, request: Request) -> Route:
        whose = request.ask.request_class
        exclude = request.exclude | request.exclude_lbs if request.exclude_lbs else request.exclude
        return Route(self.routed(request), whose.geographies, whose.tenant, request.sender, exclude)

    def choose(self, request: Request) -> Choice:
        """Where it goes now; the instance is left open."""
        if not self.selective and not self._restricts(request):
            return _HERE
        route = self.route(request)
        choice = self._by_model[request.ask.model].choose(route, self._clock(), conducted=True)
        if choice.where is Where.NOWHERE and self._may_come(route):
            return Choice(Where.WAIT)
        return choice

    def _may_come(self, route: Route) -> bool:
        """Somebody who may serve it is known, and not heard yet; or nobody has said who there is."""
        if route.sender:
            return False
        return not self.told() or any(
            self.geography.may(self.region, region, route.geographies, route.tenant).allowed
            for region in self._regions.values()
        )

    def _restricts(self, request: Request) -> bool:
        """Law or contract may speak against this region."""
        return bool(self.region and (request.ask.request_class.geographies or self.geography.tenants))

    def serves_here(self, request: Request) -> bool:
        """As far as law and contracts go."""
        whose = request.ask.request_class
        return self.geography.serves(self.region, whose.geographies, whose.tenant).allowed

    def elsewhere(self, request: Request) -> str:
        """Another load balancer that has room for what this region has refused; empty if none has."""
        if request.sender or not self._regions:
            return ""
        two, route = self._by_model[request.ask.model], self.route(request)
        allowed = two.others_for(route)
        target = two.remote.choose(route.routed, self._clock(), allowed, route.exclude) if allowed else None
        return "" if target is None else target.name

    def still_away(self, names: set[str]) -> set[str]:
        """Of these load balancers, those that do not answer."""
        there = {target.name for two in self._by_model.values() for target in two.remote if target.live}
        return names - there

    def hold_here(self, request: Request, cluster: str = "") -> Hold | None:
        """A place at a cluster's instances, while its conductor says at which: to be released then."""
        layer = self.local(request.ask.model, cluster) if self.selective else None
        return None if layer is None else Hold(layer)

    def sent(self, request: Request, name: str) -> Target | None:
        """To another load balancer."""
        self._under_way.sent(name, request.ask.model)
        return self._by_model[request.ask.model].remote.sent(self.routed(request), name)

    def hits(self) -> tuple[int, int]:
        """Chunks of prompts that instances had been sent before, and chunks in all; zeros with another policy."""
        policies = [layer.policy for two in self._by_model.values() for layer in _own(two)]
        counted = [(each.hit_chunks, each.asked_chunks) for each in policies if isinstance(each, PrefixTree)]
        return sum(hit for hit, _ in counted), sum(asked for _, asked in counted)

    def instances(self) -> Iterator[tuple[Target, bool]]:
        """That are served from here, and whether they have room."""
        now_s = self._clock()
        for two in self._by_model.values():
            for layer in _own(two):
                available = {target.name for target in layer.available(now_s)}
                for target in layer:
                    yield target, target.name in available

    def dry_run(self, model: str, geographies: Collection[str], tenant: str) -> list[Possible]:
        """Where such a request could go now, and why not."""
        return self._by_model[model].dry_run(Route(Routed(), geographies, tenant), self._clock())

    # -- the queue

    def demand(self, request: Request) -> int:
        """The number of what it may go to: the same for all that may go to the same. Raises as
        :meth:`Demands.number`."""
        if not self.selective and not self._restricts(request):
            return ANY_DEMAND
        whose, model = request.ask.request_class, request.ask.model
        tenant = whose.tenant if whose.tenant in self.geography.tenants else ""
        # By what it may go to, not by how it says so: there are a few of these, and names can be put together at will.
        regions = frozenset(
            region for region in self._known() if self.geography.serves(region, whose.geographies, tenant).allowed
        )
        return self._demands.number(model, regions, Route(Routed(), whose.geographies, tenant, request.sender))

    def _known(self) -> frozenset[str]:
        """Regions that requests could go to."""
        adopted = {region for two in self._by_model.values() for region, _ in two.adopted.values()}
        known = frozenset({self.region, *self._regions.values(), *adopted})
        if known != self._numbered_for:
            self._numbered_for = known
            self._demands.renumber()
        return known

    def is_open(self, demand: int) -> bool:
        """Whether one of those that it names has room now; also if none of them is there, which the request finds out
        for itself."""
        known = self._demands.get(demand)
        if known is None or not self.selective:
            return True
        two, route = self._by_model[known[0]], known[1]
        return has_room(two, route, self._clock()) or not anybody(two, route)

    def may_wait(self, request: Request) -> bool:
        """Somebody who may serve it is there, and may have room soon."""
        return self.selective and anybody(self._by_model[request.ask.model], self.route(request))

    def granted(self, demand: int) -> Hold | None:
        """Its turn has come: a place at the layer that it will go to is taken until its target is known."""
        known = self._demands.get(demand)
        if known is None or not self.selective:
            return None
        return hold(self._by_model[known[0]], known[1], self._clock())


def _own(two: TwoLayers) -> list[Layer]:
    """What is served from here."""
    return [two.local, *(layer for _, layer in two.adopted.values())]
