"""The metrics of several processes merged into those of one. No I/O: pages in, the families of one page out.

Counters and histograms are summed. So are gauges of how many there are or how much is held. Gauges that describe a
state, or that all processes know alike, get an additional label ``process``. The last counts of an ended process stay
in the sums: a falling counter would look like one that restarted.
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
"""The gauges that are summed over all processes."""
PROCESS: Final = "process"


class _Key(NamedTuple):
    """The name and labels of one sample."""

    name: str
    labels: tuple[tuple[str, str], ...]


class _Family(NamedTuple):
    name: str
    text: str
    kind: str

    @property
    def grows(self) -> bool:
        """True if the samples are sums since a process began."""
        return self.kind in ("counter", "histogram", "summary")


Samples = dict[_Key, float]


class Merged:
    """The merged metrics, for one thread at a time: ``told`` takes pages, ``ended`` an end, ``families`` yields all."""

    def __init__(self) -> None:
        self._families: dict[str, _Family] = {}
        """The families, in the order in which they were first seen."""
        self._grown: dict[int, dict[str, Samples]] = {}
        """The last known growing samples, by process and family."""
        self._now: dict[int, dict[str, Samples]] = {}
        """The last known samples of other kinds, by process and family."""
        self._past: dict[str, Samples] = {}
        """The sums of growing samples of processes that have ended."""

    def told(self, process: int, page: str) -> None:
        """Stores a process's page. Raises ``ValueError``, with nothing changed, if the page is not one of metrics."""
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
        """Notes that a process does not answer; its counts stay valid."""
        self._now.pop(process, None)

    def ended(self, process: int) -> None:
        """Moves the counts of an ended process to the past, so that a successor can count from zero."""
        self._now.pop(process, None)
        for name, samples in self._grown.pop(process, {}).items():
            _add(self._past.setdefault(name, {}), samples)

    def families(self) -> Iterator[Metric]:
        """Yields the merged families in Prometheus' form."""
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
