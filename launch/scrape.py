"""The metrics of a running cluster, read from outside: for the demo and the tests."""

from __future__ import annotations

import urllib.request
from collections.abc import Collection
from urllib.parse import urlencode

from prometheus_client.parser import text_string_to_metric_families

from launch.cluster import LocalCluster


class Scrape:
    """The metrics of every living service of a cluster, or of those in ``only``, at one moment.

    If ``metrics`` names samples, services make and send only these, for a third of the work."""

    def __init__(
        self, cluster: LocalCluster, only: Collection[str] | None = None, metrics: Collection[str] = ()
    ) -> None:
        asked = f"?{urlencode([('name[]', name) for name in metrics])}" if metrics else ""
        self.samples: dict[tuple[str, str, tuple[str, ...]], float] = {}
        for name, service in cluster.services.items():
            if not service.alive or (only is not None and name not in only):
                continue
            with urllib.request.urlopen(f"http://{service.endpoints['metrics']}/metrics{asked}", timeout=30) as reply:
                for family in text_string_to_metric_families(reply.read().decode()):
                    for sample in family.samples:
                        key = (name, sample.name, tuple(sample.labels.values()))
                        self.samples[key] = self.samples.get(key, 0.0) + sample.value

    def total(self, metric: str, service: str = "") -> float:
        """Returns the sum over labels, and over services unless one is named.

        Raises :class:`LookupError` for an unknown metric, as a misspelt name must not read as 0."""
        found = [value for (owner, name, _), value in self.samples.items() if name == metric and service in ("", owner)]
        if not found:
            raise LookupError(f"there is no metric {metric} of {service or 'any service'}")
        return sum(found)

    def labelled(self, metric: str, label: str) -> float:
        """Returns the sum over services of the samples with this label value; 0 where it has not occurred yet."""
        return sum(value for (_, name, labels), value in self.samples.items() if name == metric and label in labels)
