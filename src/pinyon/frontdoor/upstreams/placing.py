"""Where a request goes now: to a server of this region, else to another region, else it waits."""

from __future__ import annotations

from typing import Final

from pinyon.core.clock import Clock
from pinyon.core.errors import InvalidArgument, ResourceExhausted
from pinyon.frontdoor.failures import REGION_FIELD
from pinyon.frontdoor.room import anybody
from pinyon.frontdoor.seekers import Seekers
from pinyon.frontdoor.served_models import ServedModels
from pinyon.frontdoor.upstreams.forward import Forward
from pinyon.routing.two_layers import Choice, Where

__all__ = ["Placing"]

CHOSEN: Final = (Where.LOCAL, Where.ADOPTED, Where.REMOTE)
NEWS_S: Final = 0.5
"""Room may come up without news of it."""


class Placing:
    """One per load balancer. ``wait_s``: so long somebody else is waited for who may take a request that failed."""

    def __init__(self, models: ServedModels, wait_s: float, clock: Clock, seekers: Seekers) -> None:
        self._models = models
        self._wait_s = wait_s
        self._seekers = seekers
        self._clock = clock

    def check_law(self, forward: Forward) -> None:
        """Raises :class:`InvalidArgument` for what nobody who is known may serve."""
        models, route = self._models, forward.route
        if not models.region:
            return
        verdict = models.geography.serves(models.region, route.geographies, route.tenant)
        layers = forward.served.layers
        if verdict.allowed or layers.others_for(route) or layers.adopted_by_law(route):
            return
        if not models.may_come(route):
            raise InvalidArgument(f"This region may not serve it: {verdict.reason}.", field="geographies")

    def now(self, forward: Forward) -> Choice | None:
        """Which server of the region with room it goes to if its turn comes at once; None: that is not so easy. A
        choice is good until something else happens."""
        layers, now_s = forward.served.layers, self._clock()
        choice = layers.choose(forward.route, now_s)
        # One at the door of a full server is no sign that there is room.
        return choice if choice.where is Where.LOCAL and layers.local.takes(choice.target, now_s) else None

    async def place(self, forward: Forward) -> Choice | None:
        """Where it goes now; None: nobody else may have it now, and somebody has refused it. Raises
        :class:`PinyonError`."""
        served = forward.served
        while True:
            forward.ticket.release()  # from here on it is counted when it is sent
            choice = self._choose(forward)
            if choice.where in CHOSEN:
                return choice
            if choice.where is Where.NOWHERE and not self._models.may_come(forward.route):
                raise InvalidArgument("No region that is known may serve it.", field="geographies")
            if self._models.by_name.get(served.name) is not served:
                raise served.nobody()  # no server lists it any more
            if self._waits(forward):
                await forward.again(self._models.demand(served, forward.route))
                continue
            if forward.refusal is not None:
                return None
            with self._seekers.one(chosen=bool(forward.geographies)):
                found = await self._elsewhere(forward)
            if found is not None:
                return found

    async def _elsewhere(self, forward: Forward) -> Choice | None:
        """Somebody who has not failed it; as it has had its turn, it keeps it. None: back into the line with it."""
        give_up_s = self._clock() + self._wait_s
        while True:
            left_s = give_up_s - self._clock()
            failed = bool(forward.exclude) and not forward.served.others(forward.exclude)
            if forward.sender and forward.error is None:
                raise ResourceExhausted(forward.served.nobody().message, field=REGION_FIELD)
            if left_s <= 0 or failed or forward.sender:
                raise forward.error or forward.served.nobody()
            await self._models.wait_news(min(left_s, NEWS_S))
            choice = self._choose(forward)
            if choice.where in CHOSEN:
                return choice
            if self._waits(forward):
                return None

    def _choose(self, forward: Forward) -> Choice:
        """Which server of an adopted cluster is said, too, and which cluster that is."""
        layers, now_s = forward.served.layers, self._clock()
        choice = layers.choose(forward.route, now_s)
        if choice.where is not Where.ADOPTED:
            return choice
        forward.cluster = choice.target
        target = layers.adopted[choice.target][1].choose(forward.routed, now_s, exclude=forward.exclude)
        return Choice(Where.WAIT) if target is None else Choice(Where.ADOPTED, target.name)

    @staticmethod
    def _waits(forward: Forward) -> bool:
        """It can go back into the line, for others than those that have failed it."""
        return anybody(forward.served.layers, forward.route)
