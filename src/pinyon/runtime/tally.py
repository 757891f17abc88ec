"""Prometheus histograms and counters for one thread: what these count costs a tenth of what any thread may count."""

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

__all__ = ["Count", "Tally"]


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


class Count(Collector):
    """Shows what :class:`prometheus_client.Counter` would; as with :class:`Tally`."""

    def __init__(self, name: str, text: str, labels: Sequence[str] = (), *, registry: CollectorRegistry) -> None:
        """``name`` ends in ``_total``."""
        self._name, self._text, self._labels = name.removesuffix("_total"), text, tuple(labels)
        self._counts: dict[tuple[str, ...], int] = {} if labels else {(): 0}
        self._created_unix_s = {each: time.time() for each in self._counts}
        registry.register(self)

    def inc(self, *labels: str, by: int = 1) -> None:
        """So many more, no less than 0, with these values of the labels."""
        counts = self._counts
        if labels in counts:
            counts[labels] += by
        elif len(labels) != len(self._labels):
            raise ValueError(f"{self._name} has the labels {list(self._labels)}, got {list(labels)}")
        else:
            self._created_unix_s[labels] = time.time()
            counts[labels] = by

    def collect(self) -> Iterator[Metric]:
        metric = Metric(self._name, self._text, "counter")
        for values, count in list(self._counts.items()):
            labels = dict(zip(self._labels, values, strict=True))
            metric.add_sample(f"{self._name}_total", labels, count)
            metric.add_sample(f"{self._name}_created", labels, self._created_unix_s[values])
        yield metric
