"""The way of a request: an instance of its region, else another region, else the queue (SkyWalker §3.1, Listing 1).

A request from another region (its ``sender``) is placed here or refused, and never goes on to a third. So there are no
loops, whatever load balancers believe of each other."""

from __future__ import annotations

import math
from collections.abc import Collection
from enum import StrEnum
from typing import NamedTuple

from pinyon.routing.geography import ANYWHERE, Geography
from pinyon.routing.layer import Layer
from pinyon.routing.pushing import UNLIMITED
from pinyon.routing.target import Routed


class Where(StrEnum):
    LOCAL = "local"
    ADOPTED = "adopted"
    """Instances of a region whose load balancers have failed."""
    REMOTE = "remote"
    WAIT = "wait"
    NOWHERE = "nowhere"
    """Waiting does not help: no known target may serve the request."""


class RoutingChoice(NamedTuple):
    """A decision. Its ``target`` is an instance, an adopted cluster, or another load balancer.

    The target is empty when the request waits, and for ``LOCAL`` where a conductor places requests."""

    where: Where
    target: str = ""


class Possible(NamedTuple):
    """A line of a dry run: whether a request could go to a load balancer now (ours: no ``target``), and why."""

    region: str
    target: str
    allowed: bool
    available: bool
    reason: str


class RoutedRequest(NamedTuple):
    """A request to be routed, with the limits on where it may go."""

    routed: Routed
    geographies: Collection[str] = ()
    tenant: str = ""
    sender: str = ""
    """A region other than this one, if the request came from there: the law for that region's requests applies."""
    exclude: Collection[str] = ()
    """Instances and load balancers that have failed or refused the request."""


class ModelRoom(NamedTuple):
    """The room for a model that another region is told of.

    There are ``targets``, of which ``available`` have room, and ``running`` requests. Each load balancer with a share
    may send ``share`` further requests (None: nothing is counted)."""

    targets: int
    available: int
    running: int
    share: int | None


class TwoLayers:
    """The local and the remote layer of one model in one region."""

    def __init__(self, region: str, local: Layer, remote: Layer, geography: Geography = ANYWHERE) -> None:
        self.region = region
        self.local, self.remote = local, remote
        self.adopted: dict[str, tuple[str, Layer]] = {}
        """Instances of other regions that are served from here while no load balancer there works (§4.2).

        By the cluster's name: the region they are in, by which law goes, and their layer."""
        self.geography = geography

    def choose(self, route: RoutedRequest, now_s: float, *, conducted: bool = False) -> RoutingChoice:
        """Returns where the request goes. ``conducted``: a conductor chooses; the local layer only tells of room."""
        here = self.geography.serves(self.region, route.geographies, route.tenant).allowed
        if not self.adopted and not conducted:
            target = self.local.choose(route.routed, now_s, exclude=route.exclude) if here else None
            return self._elsewhere(route, here, now_s) if target is None else RoutingChoice(Where.LOCAL, target.name)
        adopted = self.adopted_by_law(route)
        served = self._served_here(route, here, adopted, now_s, conducted)
        if served is not None:
            return served
        return self._elsewhere(route, here or bool(adopted), now_s)

    def _elsewhere(self, route: RoutedRequest, here: bool, now_s: float) -> RoutingChoice:
        """Returns another region with room, or else whether to wait. ``here``: this region may serve, but is full."""
        if route.sender:
            return RoutingChoice(Where.WAIT if here else Where.NOWHERE)
        allowed = self.others_for(route)
        if allowed:
            target = self.remote.choose(route.routed, now_s, allowed, route.exclude)
            if target is not None:
                return RoutingChoice(Where.REMOTE, target.name)
        return RoutingChoice(Where.WAIT if here or allowed else Where.NOWHERE)

    def _served_here(
        self, route: RoutedRequest, here: bool, adopted: Collection[str], now_s: float, conducted: bool
    ) -> RoutingChoice | None:
        """Chooses an instance of the region or an adopted one, which counts as local (§4.2); None if none has room.

        The instance that has the prompt is preferred, then the least busy."""
        found: RoutingChoice | None = None
        best = (-1, 0.0)
        for name in ([""] if here else []) + list(adopted):
            layer = self.adopted[name][1] if name else self.local
            if conducted:
                room = layer.has_room(now_s, exclude=route.exclude)
                if not room and not layer.may_wait(route.routed, now_s, route.exclude):
                    continue
                if not adopted:
                    return RoutingChoice(Where.LOCAL)
            target = layer.choose(route.routed, now_s, exclude=route.exclude)
            if target is None and not conducted:
                continue
            if name:
                choice = RoutingChoice(Where.ADOPTED, name)
            else:
                choice = RoutingChoice(Where.LOCAL, "" if target is None or conducted else target.name)
            rank = (0, -math.inf) if target is None else (layer.affinity(route.routed, target), -target.fullness)
            if found is None or rank > best:
                found, best = choice, rank
        return found

    def with_room(self, route: RoutedRequest, now_s: float) -> Layer | None:
        """Returns the layer that the request would go to now, or None if no target that may serve it has room."""
        here = self.geography.serves(self.region, route.geographies, route.tenant).allowed
        if here and self.local.has_room(now_s, exclude=route.exclude):
            return self.local
        if name := self.adopted_for(route, now_s):
            return self.adopted[name][1]
        others = self._others(route)
        return self.remote if others and self.remote.has_room(now_s, others, route.exclude) else None

    def anybody(self, route: RoutedRequest) -> bool:
        """Returns whether any target may serve the request, and may have room soon."""
        here = self.geography.serves(self.region, route.geographies, route.tenant).allowed
        layers = [layer for _, layer in self.adopted.values()]
        if here:
            layers.append(self.local)
        others = self._others(route)
        return any(
            target.live and target.batches and target.name not in route.exclude for layer in layers for target in layer
        ) or any(target.live for target in self.remote if target.name in others and target.name not in route.exclude)

    def _others(self, route: RoutedRequest) -> Collection[str]:
        return frozenset() if route.sender or not len(self.remote) else self.others_for(route)

    def room_for(self, region: str, sharing: int, now_s: float) -> ModelRoom | None:
        """Returns the room for requests of another region by the law for all of them, or None if nobody serves here.

        ``sharing``: the number of load balancers that may send."""
        may = self.geography.may
        layers = [self.local, *(layer for of, layer in self.adopted.values() if may(region, of, (), "").allowed)]
        if not any(map(len, layers)):
            return None
        there = [each for layer in layers for each in layer if each.batches and each.live and not each.draining]
        spare = min(UNLIMITED, sum(layer.spare(now_s) for layer in layers))
        share = None if spare >= UNLIMITED else max(1, spare // max(1, sharing)) if spare else 0
        running = sum(target.outstanding for target in there)
        return ModelRoom(len(there), sum(layer.with_room(now_s) for layer in layers), running, share)

    def adopted_for(self, route: RoutedRequest, now_s: float) -> str:
        """Returns the adopted cluster with the most room for the request; empty if none has any."""
        rooms = {name: self.adopted[name][1].spare(now_s, exclude=route.exclude) for name in self.adopted_by_law(route)}
        best = max(rooms, key=rooms.__getitem__, default="")
        return best if rooms.get(best) else ""

    def adopted_by_law(self, route: RoutedRequest) -> list[str]:
        """Returns the adopted clusters that may serve the request, also one of another region: it is no second hop."""
        if not self.adopted:
            return []
        geography, sender = self.geography, route.sender or self.region
        return [
            name
            for name, (region, _) in self.adopted.items()
            if geography.may(sender, region, route.geographies, route.tenant).allowed
        ]

    def others_for(self, route: RoutedRequest) -> set[str]:
        """Returns the load balancers of other regions that law and contracts let serve the request."""
        geography = self.geography
        return {
            target.name
            for target in self.remote
            if geography.may(self.region, target.region, route.geographies, route.tenant).allowed
        }

    def dry_run(self, route: RoutedRequest, now_s: float) -> list[Possible]:
        """Returns where the request could go and why not, its own region first. Changes nothing."""
        verdict = self.geography.serves(self.region, route.geographies, route.tenant)
        room = self.local.with_room(now_s)
        found = [Possible(self.region, "", verdict.allowed, room > 0, _why(verdict.reason, room > 0, "instance"))]
        available = {target.name for target in self.remote.available(now_s, exclude=route.exclude)}
        for target in self.remote:
            verdict = self.geography.may(self.region, target.region, route.geographies, route.tenant)
            there = target.name in available
            found.append(
                Possible(target.region, target.name, verdict.allowed, there, _why(verdict.reason, there, "region"))
            )
        return found


def _why(reason: str, available: bool, what: str) -> str:
    if available:
        return reason
    missing = "no instance has room" if what == "instance" else "it is not available: full, away, or its queue is long"
    return f"{reason}; {missing}"
