"""The decisions that a load balancer makes alone: requests that go on or are refused, and each tenant's rate."""

from __future__ import annotations

from dataclasses import dataclass

from pinyon.core.journal import Journal
from pinyon.routing.queue import AGEING_S, RequestQueue
from pinyon.routing.rates import TenantRates

FRONT_INPUTS = {
    "queue": ("reserve", "enter", "next", "leave", "put_back", "cancel"),
    "rates": ("request", "take", "give_back"),
}
"""The methods that change state, by module."""
FRONT_GONE = (("queue", "deadline_s"),)
"""Arguments in older journals that are ignored; this one was always infinite."""


@dataclass(frozen=True, slots=True)
class FrontConfig:
    """The configuration. ``slots``, ``limit``: requests; ``ageing_s``: seconds that a level of priority is worth."""

    slots: int
    limit: int
    ageing_s: float = AGEING_S


class FrontDecisions:
    """The queue and the tenants' rates. With a ``journal``, all their inputs are recorded."""

    def __init__(self, config: FrontConfig, journal: Journal | None = None) -> None:
        self.queue = RequestQueue(config.slots, config.limit, config.ageing_s)
        self.rates = TenantRates()
        if journal is not None:
            self.queue = journal.record("queue", self.queue, FRONT_INPUTS["queue"])
            self.rates = journal.record("rates", self.rates, FRONT_INPUTS["rates"])
