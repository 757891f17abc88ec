"""The metrics of eviction: how much went, how much of it was missed, and the beliefs of a policy that learns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pinyon.eviction.evictor import Evictor
from pinyon.eviction.policy import Belief

CATEGORIES_MAX = 32
"""The number of series by category, which is limited since clients name kinds and turns."""
OTHER = "other"


def show_eviction(registry: CollectorRegistry, service: str, things: str, evictor: Evictor[Any]) -> None:
    """Adds the metrics to the registry as ``pinyon_<service>_...``; ``things`` names what is evicted there."""
    registry.register(_Eviction(f"pinyon_{service}", things, evictor))


class _Eviction(Collector):
    """Figures read by the metrics server's thread; each is a number or a mapping that is never changed."""

    def __init__(self, prefix: str, things: str, evictor: Evictor[Any]) -> None:
        self._prefix = prefix
        self._things = things
        self._evictor = evictor

    def collect(self) -> Iterator[Metric]:
        prefix, things, evictor = self._prefix, self._things, self._evictor
        regrets = evictor.regrets
        yield CounterMetricFamily(f"{prefix}_evicted_{things}", f"{things.title()} evicted.", value=evictor.evicted)
        text = f"{things.title()} that came back before as many had been evicted after them as are held."
        yield CounterMetricFamily(f"{prefix}_regretted_{things}", text, value=regrets.keys)
        text = "Seconds between their eviction and their coming back, together."
        yield CounterMetricFamily(f"{prefix}_regretted_seconds", text, value=regrets.seconds)
        share = GaugeMetricFamily(
            f"{prefix}_eviction_reuse_share",
            f"Share of {things} that are used again, as the eviction policy believes, by category of request.",
            labels=("category",),
        )
        mean_s = GaugeMetricFamily(
            f"{prefix}_eviction_reuse_mean_seconds",
            "Mean time until then, as it believes.",
            labels=("category",),
        )
        for category, belief in shown(evictor.beliefs()).items():
            share.add_metric((category,), belief.share)
            mean_s.add_metric((category,), belief.mean_s)
        yield from (share, mean_s)


def shown(beliefs: Mapping[str, Belief]) -> dict[str, Belief]:
    """Returns the beliefs with the largest shares, and the mean of the rest."""
    order = sorted(beliefs.items(), key=lambda each: (-each[1].share, each[0]))
    if len(order) <= CATEGORIES_MAX:
        return dict(order)
    kept, rest = order[: CATEGORIES_MAX - 1], [belief for _, belief in order[CATEGORIES_MAX - 1 :]]
    share, mean_s = (sum(values) / len(rest) for values in zip(*rest, strict=True))
    return {**dict(kept), OTHER: Belief(share, mean_s)}
