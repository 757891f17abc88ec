"""Prometheus counters and histograms for one thread: what these count costs a tenth of what any thread may count.

``prometheus_client``'s own take a lock and check what they are told with every step, 1 to 2 µs each; a request has ten.
They are changed by one thread, with one operation of a dictionary; whoever reads them may be another one, and may miss
what is counted at that moment. Labels must have few values: what was counted once stays. Times at which series began
(``_created``) are not shown.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from math import inf
from typing import TYPE_CHECKING, Any, cast

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.utils import floatToGoString

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

_shown: Any = floatToGoString
Labels = tuple[str | int, ...]


class Count:
    """Shows what :class:`prometheus_client.Counter` would."""

    def __init__(self, name: str, text: str, labels: Sequence[str] = (), *, registry: CollectorRegistry) -> None:
        """``name``: with or without ``_total``, which is shown behind it."""
        self._name, self._text, self._labels = name.removesuffix("_total"), text, tuple(labels)
        self._counts: dict[Labels, int] = {} if labels else {(): 0}
        registry.register(cast("Collector", self))

    def add(self, labels: Labels = (), amount: int = 1) -> None:
        """So many more, no less than 0, with these values of the labels."""
        count = self._counts.get(labels)
        if count is None:
            if len(labels) != len(self._labels):
                raise ValueError(f"{self._name} has the labels {list(self._labels)}, got {list(labels)}")
            count = 0
        self._counts[labels] = count + amount

    def by_label(self) -> dict[str, int]:
        """What was counted, by the value of the one label."""
        return {str(label): count for (label,), count in self._counts.items()}

    def collect(self) -> Iterator[Metric]:
        metric = Metric(self._name, self._text, "counter")
        for labels, count in self._counts.copy().items():
            metric.add_sample(f"{self._name}_total", dict(zip(self._labels, map(str, labels), strict=True)), count)
        yield metric


class Tally:
    """Shows what :class:`prometheus_client.Histogram` would, with one label or none."""

    def __init__(
        self, name: str, text: str, label: str = "", *, buckets: Sequence[float], registry: CollectorRegistry
    ) -> None:
        """``buckets``: upper bounds, rising. Raises ``ValueError`` for others."""
        if not buckets or any(low >= high for low, high in pairwise(buckets)):
            raise ValueError(f"bounds of buckets must rise, got {list(buckets)}")
        self._name, self._text, self._label = name, text, label
        self._bounds = [*buckets] if buckets[-1] == inf else [*buckets, inf]
        self._known: dict[str, list[float]] = {}
        """By the label's value, empty without a label: a count for each bucket, and the sum of the values."""
        if not label:
            self.show("")
        registry.register(cast("Collector", self))

    def show(self, of: str) -> None:
        """This value of the label is there from now on, with nothing in it."""
        self._known.setdefault(of, [0.0] * (len(self._bounds) + 1))

    def observe(self, value: float, of: str = "") -> None:
        """One more, which is a number."""
        known = self._known.get(of)
        if known is None:
            self.show(of)
            known = self._known[of]
        known[bisect_left(self._bounds, value)] += 1
        known[-1] += value

    def collect(self) -> Iterator[Metric]:
        metric = Metric(self._name, self._text, "histogram")
        for of, known in self._known.copy().items():
            labels = {self._label: of} if self._label else {}
            *each, total = known.copy()
            counts = list(accumulate(each))
            for bound, count in zip(self._bounds, counts, strict=True):
                metric.add_sample(f"{self._name}_bucket", {**labels, "le": _shown(bound)}, count)
            metric.add_sample(f"{self._name}_count", labels, counts[-1])
            if self._bounds[0] >= 0:
                metric.add_sample(f"{self._name}_sum", labels, total)
        yield metric
