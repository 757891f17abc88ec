"""Prometheus counters and histograms for one thread, at a tenth of the cost of those for any thread.

``prometheus_client``'s own take a lock and check their arguments at every step, 1 to 2 µs each; a request has ten.
Those here are changed by one thread, with one dictionary operation per step. Another thread may read them, and may miss
a step of that moment. Labels must have few values, as series are never removed. The times at which series began
(``_created``) are not shown."""

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
    """A counter that shows what :class:`prometheus_client.Counter` would."""

    def __init__(self, name: str, text: str, labels: Sequence[str] = (), *, registry: CollectorRegistry) -> None:
        """Takes the ``name`` with or without ``_total``, which is appended to it in any case."""
        self._name, self._text, self._labels = name.removesuffix("_total"), text, tuple(labels)
        self._counts: dict[Labels, int] = {} if labels else {(): 0}
        registry.register(cast("Collector", self))

    def add(self, labels: Labels = (), amount: int = 1) -> None:
        """Adds ``amount``, at least 0, for these values of the labels."""
        count = self._counts.get(labels)
        if count is None:
            if len(labels) != len(self._labels):
                raise ValueError(f"{self._name} has the labels {list(self._labels)}, got {list(labels)}")
            count = 0
        self._counts[labels] = count + amount

    def by_label(self) -> dict[str, int]:
        """Returns the counts by the value of the one label."""
        return {str(label): count for (label,), count in self._counts.items()}

    def collect(self) -> Iterator[Metric]:
        metric = Metric(self._name, self._text, "counter")
        for labels, count in self._counts.copy().items():
            metric.add_sample(f"{self._name}_total", dict(zip(self._labels, map(str, labels), strict=True)), count)
        yield metric


class Tally:
    """A histogram that shows what :class:`prometheus_client.Histogram` would, with one label or none."""

    def __init__(
        self, name: str, text: str, label: str = "", *, buckets: Sequence[float], registry: CollectorRegistry
    ) -> None:
        """Takes rising upper bounds of ``buckets``. Raises ``ValueError`` if they do not rise."""
        if not buckets or any(low >= high for low, high in pairwise(buckets)):
            raise ValueError(f"bounds of buckets must rise, got {list(buckets)}")
        self._name, self._text, self._label = name, text, label
        self._bounds = [*buckets] if buckets[-1] == inf else [*buckets, inf]
        self._known: dict[str, list[float]] = {}
        """Each bucket's count, and then the sum of values, by the label's value (empty without a label)."""
        if not label:
            self.show("")
        registry.register(cast("Collector", self))

    def show(self, of: str) -> None:
        """Adds an empty series for this value of the label."""
        self._known.setdefault(of, [0.0] * (len(self._bounds) + 1))

    def observe(self, value: float, of: str = "") -> None:
        """Counts one value, for the value ``of`` the label; ``value`` must not be NaN."""
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
