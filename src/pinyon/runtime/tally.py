"""A Prometheus histogram for one thread: what it counts costs a tenth of one that any thread may count in."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from math import inf

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

__all__ = ["Tally"]


class Tally(Collector):
    """Without labels. Shows what :class:`prometheus_client.Histogram` would; whoever reads it may be another thread,
    and may miss what is counted at that moment."""

    def __init__(self, name: str, text: str, *, buckets: Sequence[float], registry: CollectorRegistry) -> None:
        """``buckets``: upper bounds, rising. Raises ``ValueError`` for others."""
        if not buckets or any(low >= high for low, high in pairwise(buckets)):
            raise ValueError(f"bounds of buckets must rise, got {list(buckets)}")
        self._name, self._text = name, text
        self._bounds = [*buckets] if buckets[-1] == inf else [*buckets, inf]
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0
        self._created_unix_s = time.time()
        registry.register(self)

    def observe(self, value: float) -> None:
        """One more, which is a number."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[Metric]:
        metric = Metric(self._name, self._text, "histogram")
        counts, total = list(accumulate(self._counts[:])), self._sum
        for bound, count in zip(self._bounds, counts, strict=True):
            le = floatToGoString(bound)  # type: ignore[no-untyped-call]
            metric.add_sample(f"{self._name}_bucket", {"le": le}, count)
        metric.add_sample(f"{self._name}_count", {}, counts[-1])
        if self._bounds[0] >= 0:
            metric.add_sample(f"{self._name}_sum", {}, total)
        metric.add_sample(f"{self._name}_created", {}, self._created_unix_s)
        yield metric
