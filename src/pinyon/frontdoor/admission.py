"""Who is let in: a tenant's limits per minute, and then a place in the queue. Before anything else is done for a
request."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from pinyon.core.clock import Clock
from pinyon.core.errors import ResourceExhausted
from pinyon.frontdoor.auth import Client
from pinyon.frontdoor.line import Line, Place
from pinyon.frontdoor.metrics import DoorMetrics
from pinyon.frontdoor.rate_limits import NO_LEVELS, Levels, RateLimited
from pinyon.routing.rates import Rates


class Turn(Protocol):
    """Of one request, taken and left by the request loop; see :class:`Ticket`."""

    def enter(self, tokens: int, *, priority: int = 0, demand: int = 0, room: bool = False) -> bool: ...

    async def wait(self) -> None: ...

    def release(self) -> None: ...

    async def again(self, demand: int) -> bool: ...

    def leave(self, used_tokens: int = 0) -> None: ...


class LimitedTurn(Turn, Protocol):
    """And what is left of its tenant's limits."""

    @property
    def levels(self) -> Levels: ...


class Admission:
    """``default`` is for tenants whose API key names no limits. ``rates`` are
    :class:`pinyon.routing.rates.TenantRates`, or what writes their calls into a journal, as with :class:`Line`."""

    def __init__(
        self, line: Line, rates: Any, default: Rates, metrics: DoorMetrics, clock: Clock = time.monotonic
    ) -> None:
        self._line = line
        self._rates: Any = rates
        self._default = default
        self._metrics = metrics
        self._clock = clock

    def admit(self, client: Client) -> Ticket:
        """Let one request in (``with``). Raises :class:`RateLimited`, and :class:`ResourceExhausted` when the queue is
        full."""
        rates = self._rates_of(client)
        if rates.rpm:
            self._count(client.tenant, rates)
        try:
            place = self._line.reserve(client.tenant)
        except ResourceExhausted:
            self._metrics.refused("queue_full")
            raise
        return Ticket(self, place, client.tenant, rates)

    def count(self, client: Client) -> Rates:
        """One of the tenant's requests, whatever it is. Raises :class:`RateLimited`."""
        rates = self._rates_of(client)
        if rates.rpm:
            self._count(client.tenant, rates)
        return rates

    def _count(self, tenant: str, rates: Rates) -> None:
        with self._requests_limited(tenant, rates):
            self._rates.request(tenant, rates, self._clock())

    def check(self, client: Client) -> None:
        """Raises as :meth:`admit` would now, before anything of a request is read, and takes nothing."""
        rates = self._rates_of(client)
        if rates.rpm:
            with self._requests_limited(client.tenant, rates):
                self._rates.check(client.tenant, rates, self._clock())
        try:
            self._line.check(client.tenant)
        except ResourceExhausted:
            self._metrics.refused("queue_full")
            raise

    def _rates_of(self, client: Client) -> Rates:
        default, rpm, tpm = self._default, client.rpm, client.tpm
        if rpm is None and tpm is None:
            return default
        return Rates(default.rpm if rpm is None else rpm, default.tpm if tpm is None else tpm)

    @contextmanager
    def _requests_limited(self, tenant: str, rates: Rates) -> Iterator[None]:
        try:
            yield
        except ResourceExhausted as error:
            self._metrics.refused("requests_per_minute")
            raise RateLimited(error, self.levels(tenant, rates)) from None

    def levels(self, tenant: str, rates: Rates) -> Levels:
        if not rates.rpm and not rates.tpm:
            return NO_LEVELS
        levels: Levels = self._rates.levels(tenant, rates, self._clock())
        return levels

    def take(self, tenant: str, rates: Rates, tokens: int) -> None:
        """What a request of a tenant with such a limit may need. Raises :class:`RateLimited`."""
        try:
            self._rates.take(tenant, rates, tokens, self._clock())
        except ResourceExhausted as error:
            self._metrics.refused("tokens_per_minute")
            raise RateLimited(error, self.levels(tenant, rates)) from None

    def displaced(self) -> None:
        """One whose place was given to another tenant has learned of that."""
        self._metrics.refused("displaced")

    def give_back(self, tenant: str, rates: Rates, tokens: int) -> None:
        if tokens > 0:
            self._rates.give_back(tenant, rates, tokens, self._clock())


class Ticket:
    """One request that was let in: ``enter`` when it is known what it asks for, ``leave`` at its end."""

    __slots__ = ("_admission", "_place", "_rates", "_taken", "_tenant")

    def __init__(self, admission: Admission, place: Place, tenant: str, rates: Rates) -> None:
        self._admission = admission
        self._place = place
        self._tenant = tenant
        self._rates = rates
        self._taken = 0

    @property
    def levels(self) -> Levels:
        """What is left of the tenant's limits."""
        return self._admission.levels(self._tenant, self._rates)

    def enter(self, tokens: int, *, priority: int = 0, demand: int = 0, room: bool = False) -> bool:
        """Take the ``tokens`` that the request may need. Whether its turn is now, and it is to be said at once where
        it goes; if not, :meth:`wait` for it. ``room``: there is some, as who asks has just seen. Raises as
        :meth:`Admission.admit`."""
        if self._rates.tpm:
            self._admission.take(self._tenant, self._rates, tokens)
            self._taken = tokens
        try:
            return self._place.enter(tokens, priority=priority, demand=demand, room=room)
        except ResourceExhausted:
            self._admission.displaced()
            raise

    async def wait(self) -> None:
        """Raises :class:`ResourceExhausted` when the place was given to another tenant."""
        try:
            await self._place.wait()
        except ResourceExhausted:
            self._admission.displaced()
            raise

    def release(self) -> None:
        """It is known now where it goes: the room that was kept for it is anybody's."""
        self._place.release()

    async def again(self, demand: int) -> bool:
        """Where it went there was no room after all: give the slot up, and wait where it did before; no tokens are
        taken anew. Raises as :meth:`wait`. Returns whether it could wait."""
        try:
            await self._place.again(demand)
        except ResourceExhausted:
            self._admission.displaced()
            raise
        return True

    @property
    def has_slot(self) -> bool:
        """Its turn has come, also where it was cancelled before it learned of that."""
        return self._place.has_slot

    def spare(self) -> Place | None:
        """One more slot for the same request, if nobody waits for one: to be left for itself."""
        return self._place.spare()

    def leave(self, used_tokens: int = 0) -> None:
        """Give the place or slot to the next one, and back what was not used. Calling it twice is fine."""
        self._place.leave()
        if self._taken:
            taken, self._taken = self._taken, 0
            self._admission.give_back(self._tenant, self._rates, taken - used_tokens)

    def __enter__(self) -> Ticket:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()
