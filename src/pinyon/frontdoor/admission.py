"""Admission of requests, before anything else is done for them: the tenant's limits per minute, then the queue."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import ceil
from typing import Any

from pinyon.core.clock import Clock
from pinyon.core.errors import ResourceExhausted
from pinyon.frontdoor.auth import Client
from pinyon.frontdoor.failures import REGION_FIELD
from pinyon.frontdoor.line import Line, Place
from pinyon.frontdoor.metrics import DoorMetrics
from pinyon.http.answer import field
from pinyon.routing.rates import Level, Rates


class RateLimited(ResourceExhausted):
    """The error when a tenant exceeds its limit per minute, with the header ``fields`` that tell it. Without
    ``retry_after_s``, a retry never helps."""

    def __init__(self, error: ResourceExhausted, fields: bytes) -> None:
        super().__init__(error.message, retry_after_s=error.retry_after_s)
        self.fields = fields


class TenantAdmission:
    """The admission of requests. ``default`` is for tenants whose API key names no limits. ``rates`` is a
    :class:`pinyon.routing.rates.TenantRates`, or an object that journals its calls, as with :class:`Line`."""

    def __init__(
        self, line: Line, rates: Any, default: Rates, metrics: DoorMetrics[Any], clock: Clock = time.monotonic
    ) -> None:
        self.line = line
        self._rates: Any = rates
        self._default = default
        self.refused = metrics.refused
        self._clock = clock

    def admit(self, client: Client) -> Ticket:
        """Admits one request (``with``). Raises :class:`RateLimited`, and :class:`ResourceExhausted` when the queue is
        full."""
        rates = self.count(client)
        try:
            return Ticket(self, client.tenant, rates)
        except ResourceExhausted:
            self.refused.add(("queue_full",))
            raise

    def count(self, client: Client) -> Rates:
        """Counts one request of the tenant, of any kind. Raises :class:`RateLimited`."""
        rates = self._rates_of(client)
        if rates.rpm:
            self._apply("requests_per_minute", self._rates.request, client.tenant, rates)
        return rates

    def check(self, client: Client) -> None:
        """Raises the error that :meth:`admit` would raise now, before anything is read of a request. Takes nothing."""
        rates = self._rates_of(client)
        if rates.rpm:
            self._apply("requests_per_minute", self._rates.check, client.tenant, rates)
        try:
            self.line.check(client.tenant)
        except ResourceExhausted:
            self.refused.add(("queue_full",))
            raise

    def _rates_of(self, client: Client) -> Rates:
        default, rpm, tpm = self._default, client.rpm, client.tpm
        if rpm is None and tpm is None:
            return default
        return Rates(default.rpm if rpm is None else rpm, default.tpm if tpm is None else tpm)

    def _apply(self, reason: str, limit: Callable[..., None], tenant: str, rates: Rates, *tokens: int) -> None:
        """Applies a limit of the tenant. Raises :class:`RateLimited`, which is counted as refused for that reason."""
        try:
            limit(tenant, rates, *tokens, self._clock())
        except ResourceExhausted as error:
            self.refused.add((reason,))
            raise RateLimited(error, self.rate_fields(tenant, rates)) from None

    def rate_fields(self, tenant: str, rates: Rates) -> bytes:
        """Returns the lines ``x-ratelimit-{limit,remaining,reset}-{requests,tokens}``; empty without limits."""
        fields = b""
        if not rates.rpm and not rates.tpm:
            return fields
        levels: tuple[Level | None, Level | None] = self._rates.levels(tenant, rates, self._clock())
        for what, level in zip((b"requests", b"tokens"), levels, strict=True):
            if level is not None:
                fields += field(b"x-ratelimit-limit-" + what, b"%d" % level.limit)
                fields += field(b"x-ratelimit-remaining-" + what, b"%d" % level.remaining)
                fields += field(b"x-ratelimit-reset-" + what, _duration(level.full_s))
        return fields

    def take(self, tenant: str, rates: Rates, tokens: int) -> None:
        """Takes the tokens that a request may need from a tenant's limit. Raises :class:`RateLimited`."""
        self._apply("tokens_per_minute", self._rates.take, tenant, rates, tokens)

    def give_back(self, tenant: str, rates: Rates, tokens: int) -> None:
        if tokens > 0:
            self._rates.give_back(tenant, rates, tokens, self._clock())


class Ticket(Place):
    """The place of an admitted request: ``enter`` when it is known what it asks for, ``leave`` at its end."""

    __slots__ = ("_admission", "_rates", "_taken")

    def __init__(self, admission: TenantAdmission, tenant: str, rates: Rates) -> None:
        """Raises :class:`ResourceExhausted` when the queue is full."""
        super().__init__(admission.line, tenant)
        self._admission = admission
        self._rates = rates
        self._taken = 0

    @property
    def rate_fields(self) -> bytes:
        return self._admission.rate_fields(self.tenant, self._rates)

    def enter(self, tokens: int, *, priority: int = 0, demand: int = 0, room: bool = False) -> bool:
        """Takes the ``tokens`` that the request may need, too. Raises as :meth:`TenantAdmission.admit`."""
        if self._rates.tpm:
            self._admission.take(self.tenant, self._rates, tokens)
            self._taken = tokens
        return super().enter(tokens, priority=priority, demand=demand, room=room)

    def displaced(self, error: ResourceExhausted) -> ResourceExhausted:
        self._admission.refused.add(("displaced",))
        return error

    def leave(self, used_tokens: int = 0) -> None:
        """Leaves the place, and gives back the tokens that were not used."""
        super().leave()
        if self._taken:
            taken, self._taken = self._taken, 0
            self._admission.give_back(self.tenant, self._rates, taken - used_tokens)


class ForwardedPlace(Place):
    """The place of a request from another region, where the tenant's rates were counted."""

    __slots__ = ()

    def displaced(self, error: ResourceExhausted) -> ResourceExhausted:
        return ResourceExhausted(error.message, field=REGION_FIELD)


def _duration(seconds: float) -> str:
    """Returns a duration as OpenAI writes it: ``17ms``, ``1.5s``, ``6m0s``."""
    millis = ceil(seconds * 1e3)
    if millis < 1000:
        return f"{millis}ms"
    minutes, millis = divmod(millis, 60_000)
    return f"{minutes}m{millis / 1e3:g}s" if minutes else f"{millis / 1e3:g}s"
