"""The metrics of several processes merged into those of one. No I/O: pages in, the families of one page out.

Counters and histograms are summed. So are gauges of how many there are or how much is held. Gauges that describe a
state, or that all processes know alike, get an additional label ``process``. The last counts of an ended process stay
in the sums: a falling counter would look like one that restarted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

SUMMED: Final = frozenset(
    (
        "pinyon_lb_http_connections", "pinyon_lb_in_flight_requests", "pinyon_lb_queue_requests",
        "pinyon_lb_placing_requests", "pinyon_lb_worker_streams", "pinyon_lb_worker_sessions",
        "pinyon_lb_unfinished_tokens", "pinyon_lb_counted_placements",
        "pinyon_lb_upstream_requests", "pinyon_lb_upstream_connections",
        "process_resident_memory_bytes", "process_virtual_memory_bytes", "process_open_fds",
    )
)  # fmt: skip
"""The gauges that are summed over all processes."""
GROWING: Final = ("counter", "histogram", "summary")
"""The types of families whose samples are sums since a process began."""
PROCESS: Final = "process"

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]
"""The values of samples by their names and labels."""


class Merged:
    """The merged metrics, for one thread at a time: ``told`` takes pages, ``ended`` an end, ``families`` yields all."""

    def __init__(self) -> None:
        self._families: dict[str, Metric] = {}
        """The families, without samples, in the order in which they were first seen."""
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
        families: dict[str, Metric] = {}
        for metric in text_string_to_metric_families(page):
            families[metric.name] = Metric(metric.name, metric.documentation, metric.type)
            samples = (grown if metric.type in GROWING else now).setdefault(metric.name, {})
            for sample in metric.samples:
                samples[sample.name, tuple(sample.labels.items())] = sample.value
        self._families |= families
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
            metric = Metric(family.name, family.documentation, family.type)
            for (name, labels), value in self._samples(family).items():
                metric.add_sample(name, dict(labels), value)
            if metric.samples:
                yield metric

    def _samples(self, family: Metric) -> Samples:
        name, total = family.name, Samples()
        if family.type in GROWING:
            for grown in (self._past, *self._grown.values()):
                _add(total, grown.get(name, {}))
            return total
        for process, now in sorted(self._now.items()):
            samples = now.get(name, {})
            if name in SUMMED:
                _add(total, samples)
            else:  # processes have their infos in common
                own = () if name.endswith("_info") else ((PROCESS, str(process)),)
                total |= {(sample, (*labels, *own)): value for (sample, labels), value in samples.items()}
        return total


def _add(total: Samples, part: Samples) -> None:
    for key, value in part.items():
        total[key] = total.get(key, 0.0) + value
