"""Counts and distributions that cost a request one operation of a dictionary: what Prometheus wants is put together
when it asks.

``prometheus_client``'s own take a lock and check what they are told with every step, 1 to 2 µs each; a request has ten.
They are changed by one thread; a scrape of another one copies them in one operation of the interpreter's.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

__all__ = ["Tally", "TallyByValue"]

Labels = tuple[str | int, ...]


class Tally(Collector):
    """Counters of one name, by their labels. There must be few of these: they stay."""

    def __init__(self, registry: CollectorRegistry, name: str, text: str, labels: tuple[str, ...] = ()) -> None:
        self._name, self._text, self._labels = name, text, labels
        self._counts: dict[Labels, int] = {} if labels else {(): 0}
        registry.register(self)

    def add(self, labels: Labels = (), amount: int = 1) -> None:
        counts = self._counts
        counts[labels] = counts.get(labels, 0) + amount

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for labels, count in self._counts.copy().items():
            family.add_metric([str(label) for label in labels], count)
        yield family


class TallyByValue(Collector):
    """Histograms of one name, by one label; ``bounds`` are their buckets' upper ones, the last of which is infinity
    without being named."""

    def __init__(self, registry: CollectorRegistry, name: str, text: str, label: str, bounds: Sequence[float]) -> None:
        self._name, self._text, self._label = name, text, label
        self._bounds = tuple(map(float, bounds))
        self._known: dict[str, list[float]] = {}
        """By label: a count for each bucket, and the sum of the values."""
        registry.register(self)

    def show(self, label: str) -> None:
        """It is there from now on, with nothing in it."""
        self._known.setdefault(label, [0.0] * (len(self._bounds) + 2))

    def add(self, label: str, value: float) -> None:
        known = self._known.get(label)
        if known is None:
            self.show(label)
            known = self._known[label]
        known[bisect_left(self._bounds, value)] += 1
        known[-1] += value

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=(self._label,))
        names = [*map(str, self._bounds), "+Inf"]
        for label, known in self._known.copy().items():
            *counts, total = known.copy()
            family.add_metric([label], list(zip(names, accumulate(counts), strict=True)), total)
        yield family
