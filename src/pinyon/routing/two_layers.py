"""Where a request goes: to an instance of its region, else to another region, else it waits (SkyWalker §3.1, Listing
1).

A request that came from another region is placed here or refused; it never goes on to a third (its ``sender``), so that
there are no loops, whatever load balancers believe of each other.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from enum import StrEnum
from typing import NamedTuple

from pinyon.routing.geography import ANYWHERE, Geography
from pinyon.routing.layer import Layer
from pinyon.routing.target_policy import Routed

__all__ = ["Choice", "Possible", "Route", "TwoLayers", "Where"]


class Where(StrEnum):
    LOCAL = "local"
    ADOPTED = "adopted"
    """To instances of a region whose load balancers have failed."""
    REMOTE = "remote"
    WAIT = "wait"
    NOWHERE = "nowhere"
    """Nobody may serve it who is known: waiting does not help."""


class Choice(NamedTuple):
    """``target`` is an instance, an adopted cluster, or another load balancer; empty when it waits, and where a
    conductor places ``LOCAL`` ones."""

    where: Where
    target: str = ""


class Possible(NamedTuple):
    """Of one load balancer, for a dry run: whether a request could go there now, and why (not). The own one has no
    ``target``."""

    region: str
    target: str
    allowed: bool
    available: bool
    reason: str


class Route(NamedTuple):
    """A request on its way, beside what its target is chosen by."""

    routed: Routed
    geographies: Collection[str] = ()
    tenant: str = ""
    sender: str = ""
    """The region that it has come from, if that is another one: what law says of that one's requests counts."""
    exclude: Collection[str] = ()
    """Instances and load balancers that have failed it, or refused it."""


class TwoLayers:
    """Of one model in one region."""

    def __init__(self, region: str, local: Layer, remote: Layer, geography: Geography = ANYWHERE) -> None:
        self.region = region
        self.local, self.remote = local, remote
        self.adopted: dict[str, tuple[str, Layer]] = {}
        """Instances of other regions that are served from here for as long as nobody there does (§4.2), by the
        cluster's name: the region they are in, which law goes by, and they."""
        self.geography = geography

    def choose(self, route: Route, now_s: float, *, conducted: bool = False) -> Choice:
        """``conducted``: a conductor chooses the instance, and the local layer tells whether there is room."""
        here = self.geography.serves(self.region, route.geographies, route.tenant).allowed
        if not self.adopted and not conducted:
            target = self.local.choose(route.routed, now_s, exclude=route.exclude) if here else None
            return self._elsewhere(route, here, now_s) if target is None else Choice(Where.LOCAL, target.name)
        adopted = self.adopted_by_law(route)
        served = self._served_here(route, here, adopted, now_s, conducted)
        if served is not None:
            return served
        return self._elsewhere(route, here or bool(adopted), now_s)

    def _elsewhere(self, route: Route, here: bool, now_s: float) -> Choice:
        """By another region, or nobody now. ``here``: it may be served here, and there is no room."""
        if route.sender:
            return Choice(Where.WAIT if here else Where.NOWHERE)
        allowed = self.others_for(route)
        if allowed:
            target = self.remote.choose(route.routed, now_s, allowed, route.exclude)
            if target is not None:
                return Choice(Where.REMOTE, target.name)
        return Choice(Where.WAIT if here or allowed else Where.NOWHERE)

    def _served_here(
        self, route: Route, here: bool, adopted: Collection[str], now_s: float, conducted: bool
    ) -> Choice | None:
        """By an instance of the region, or one that was adopted, which counts as local (§4.2): the one that has the
        prompt, else the least busy."""
        found: Choice | None = None
        best = (-1, 0.0)
        for name in ([""] if here else []) + list(adopted):
            layer = self.adopted[name][1] if name else self.local
            if conducted:
                room = layer.has_room(now_s, exclude=route.exclude)
                if not room and not layer.may_wait(route.routed, now_s, route.exclude):
                    continue
                if not adopted:
                    return Choice(Where.LOCAL)
            target = layer.choose(route.routed, now_s, exclude=route.exclude)
            if target is None and not conducted:
                continue
            if name:
                choice = Choice(Where.ADOPTED, name)
            else:
                choice = Choice(Where.LOCAL, "" if target is None or conducted else target.name)
            rank = (0, -math.inf) if target is None else (layer.affinity(route.routed, target), -target.fullness)
            if found is None or rank > best:
                found, best = choice, rank
        return found

    def adopted_for(self, route: Route, now_s: float) -> str:
        """The adopted cluster with the most room for it; empty if none has any."""
        best, most = "", 0
        for name in self.adopted_by_law(route):
            spare = self.adopted[name][1].spare(now_s, exclude=route.exclude)
            if spare > most:
                best, most = name, spare
        return best

    def adopted_by_law(self, route: Route) -> list[str]:
        """Those that may serve it. What came from another region may go to an adopted one: that is no second hop, it is
        served from here."""
        if not self.adopted:
            return []
        geography, sender = self.geography, route.sender or self.region
        return [
            name
            for name, (region, _) in self.adopted.items()
            if geography.may(sender, region, route.geographies, route.tenant).allowed
        ]

    def others_for(self, route: Route) -> set[str]:
        """Load balancers of other regions that may serve it, as far as law and contracts go."""
        geography = self.geography
        return {
            target.name
            for target in self.remote
            if geography.may(self.region, target.region, route.geographies, route.tenant).allowed
        }

    def dry_run(self, route: Route, now_s: float) -> list[Possible]:
        """Where it could go and why not, its own region first. Changes nothing."""
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
