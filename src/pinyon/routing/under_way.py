"""Requests sent to another load balancer that had not arrived at the time of its last report."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping

KEPT_MAX = 1 << 16
"""The maximum number of uncounted requests kept per load balancer; older ones are assumed to have arrived."""


class UnderWay:
    """The requests under way to each load balancer.

    A report counts arrivals of all models together, but credits are per model. A session's requests arrive in order."""

    def __init__(self) -> None:
        self._models: defaultdict[str, deque[str]] = defaultdict(deque)
        self._arrived: Counter[str] = Counter()

    def sent(self, name: str, model: str) -> None:
        """Records a request for a model that was sent to that load balancer."""
        self._models[name].append(model)
        if len(self._models[name]) > KEPT_MAX:
            self._next_arrives(name)

    def told(self, name: str, received: int) -> Mapping[str, int]:
        """Returns how many requests are under way, by model, once ``received`` of ours have arrived in this session."""
        while self._models[name] and self._arrived[name] < received:
            self._next_arrives(name)
        return Counter(self._models[name])

    def forget(self, name: str) -> None:
        """Forgets a session that has ended; the next session counts from 0."""
        self._models.pop(name, None)
        self._arrived.pop(name, None)

    def _next_arrives(self, name: str) -> None:
        self._models[name].popleft()
        self._arrived[name] += 1
