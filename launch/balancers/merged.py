"""The metrics of several processes as if they were one's. No I/O: pages in, one page's families out.

Counters and histograms are summed. So are gauges of how many there are, or how much is held; those that say how
something is, or what all of them know alike, have a label ``process`` more. What a process had counted when it was
asked last stays in the sums after its end: a counter that falls would be taken for one that began again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

SUMMED: Final = frozenset(
    (
        "pinyon_lb_http_connections", "pinyon_lb_in_flight_requests", "pinyon_lb_queue_requests",
        "pinyon_lb_placing_requests", "pinyon_lb_worker_streams", "pinyon_lb_worker_sessions",
        "pinyon_lb_unfinished_tokens",
        "pinyon_lb_upstream_requests", "pinyon_lb_upstream_connections",
        "process_resident_memory_bytes", "process_virtual_memory_bytes", "process_open_fds",
    )
)  # fmt: skip
"""Gauges of which all processes together have the sum."""
PROCESS: Final = "process"


class _Key(NamedTuple):
    """Of one sample."""

    name: str
    labels: tuple[tuple[str, str], ...]


class _Family(NamedTuple):
    name: str
    text: str
    kind: str

    @property
    def grows(self) -> bool:
        """Its samples are sums since a process began."""
        return self.kind in ("counter", "histogram", "summary")


Samples = dict[_Key, float]


class Merged:
    """``told`` by each process what it says now, ``families`` of all; ``ended`` when one has. One thread at a time."""

    def __init__(self) -> None:
        self._families: dict[str, _Family] = {}
        """In the order in which they were first seen."""
        self._grown: dict[int, dict[str, Samples]] = {}
        """By process and family: what it last said of what grows."""
        self._now: dict[int, dict[str, Samples]] = {}
        """The same of what does not."""
        self._past: dict[str, Samples] = {}
        """Of processes that have ended."""

    def told(self, process: int, page: str) -> None:
        """Raises ``ValueError`` for what is no page of metrics; all is as it was then."""
        grown: dict[str, Samples] = {}
        now: dict[str, Samples] = {}
        families: dict[str, _Family] = {}
        for metric in text_string_to_metric_families(page):
            family = families[metric.name] = _Family(metric.name, metric.documentation, metric.type)
            samples = (grown if family.grows else now).setdefault(metric.name, {})
            for sample in metric.samples:
                samples[_Key(sample.name, tuple(sample.labels.items()))] = sample.value
        for name, family in families.items():
            self._families.setdefault(name, family)
        self._grown[process], self._now[process] = grown, now

    def silent(self, process: int) -> None:
        """It does not answer: what it had counted is still true."""
        self._now.pop(process, None)

    def ended(self, process: int) -> None:
        """Another one may begin in its place, and counts from nothing."""
        self._now.pop(process, None)
        for name, samples in self._grown.pop(process, {}).items():
            _add(self._past.setdefault(name, {}), samples)

    def families(self) -> Iterator[Metric]:
        """Of all, as Prometheus has them."""
        for family in self._families.values():
            metric = Metric(family.name, family.text, family.kind)
            for key, value in self._samples(family).items():
                metric.add_sample(key.name, dict(key.labels), value)
            if metric.samples:
                yield metric

    def _samples(self, family: _Family) -> Samples:
        name = family.name
        if family.grows:
            return _sum([self._past.get(name, {}), *[each.get(name, {}) for each in self._grown.values()]])
        told = {process: each[name] for process, each in sorted(self._now.items()) if name in each}
        if name in SUMMED:
            return _sum(told.values())
        if name.endswith("_info"):
            return {key: value for samples in told.values() for key, value in samples.items()}
        return {
            _Key(key.name, (*key.labels, (PROCESS, str(process)))): value
            for process, samples in told.items()
            for key, value in samples.items()
        }


def _sum(parts: Iterable[Mapping[_Key, float]]) -> Samples:
    total: Samples = {}
    for part in parts:
        _add(total, part)
    return total


def _add(total: Samples, part: Mapping[_Key, float]) -> None:
    for key, value in part.items():
        total[key] = total.get(key, 0.0) + value
