"""Requests that were sent to another load balancer and had not arrived at its last report."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping

KEPT_MAX = 1 << 16
"""Requests per load balancer that it has not counted yet; older ones are taken as arrived."""


class UnderWay:
    """The requests under way to each load balancer.

    It reports arrivals of all models together, but credits for each model. Requests of one session arrive in order."""

    def __init__(self) -> None:
        self._models: defaultdict[str, deque[str]] = defaultdict(deque)
        self._arrived: Counter[str] = Counter()

    def sent(self, name: str, model: str) -> None:
        """Records a request for a model that was sent to that load balancer."""
        self._models[name].append(model)
        if len(self._models[name]) > KEPT_MAX:
            self._next_arrives(name)

    def told(self, name: str, received: int) -> Mapping[str, int]:
        """Returns how many are under way by model, if any, once ``received`` of ours arrived in this session."""
        while self._models[name] and self._arrived[name] < received:
            self._next_arrives(name)
        return Counter(self._models[name])

    def forget(self, name: str) -> None:
        """Forgets a session that has ended; the next one counts from 0."""
        self._models.pop(name, None)
        self._arrived.pop(name, None)

    def _next_arrives(self, name: str) -> None:
        self._models[name].popleft()
        self._arrived[name] += 1
