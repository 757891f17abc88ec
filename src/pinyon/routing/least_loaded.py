"""The least busy pair the load balancer knows of.

The conductor knows what instances hold and predicts times; this policy knows neither. It compares what the load
balancer itself has in flight on each instance, per slot of its batch, and then the (possibly old) load that instances
reported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from pinyon.routing.policy import Candidate, Group, Pair

__all__ = ["LeastLoaded"]


class LeastLoaded:
    """Ties go to the smaller id, so the same arguments give the same pair; a mixed instance that is best at both keeps
    the request to itself, and no KV moves."""

    name: ClassVar[str] = "least_loaded"

    def choose(self, groups: Sequence[Group], in_flight: Mapping[str, int]) -> Pair | None:
        def busy(candidate: Candidate) -> tuple[float, int, str]:
            own = in_flight.get(candidate.instance_id, 0)
            return own / (candidate.max_batch or 1), candidate.reported, candidate.instance_id

        best: tuple[float, float, str] | None = None
        pair: Pair | None = None
        for group in groups:
            prefill, decode = min(group.prefills, key=busy), min(group.decodes, key=busy)
            rank = (busy(decode)[0], busy(prefill)[0], group.name)
            if best is None or rank < best:
                best, pair = rank, Pair(prefill, decode)
        return pair
