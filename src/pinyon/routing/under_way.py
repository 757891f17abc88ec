"""Requests that were sent to another load balancer and had not arrived at its last report."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping

KEPT_MAX = 1 << 16
"""Requests per load balancer that it has not counted yet; older ones are taken as arrived."""


class UnderWay:
    """The requests under way to each load balancer.

    It reports arrivals of all models together, but credits for each model. Requests of one session arrive in order.
    """

    def __init__(self) -> None:
        self._models: dict[str, deque[str]] = {}
        self._arrived: dict[str, int] = {}

    def sent(self, name: str, model: str) -> None:
        """Records a request for a model that was sent to that load balancer."""
        models = self._models.get(name)
        if models is None:
            models = self._models[name] = deque()
        models.append(model)
        if len(models) > KEPT_MAX:
            self._next_arrives(name, models)

    def told(self, name: str, received: int) -> Mapping[str, int]:
        """Returns how many are under way by model, if any, once ``received`` of ours arrived in this session."""
        models = self._models.get(name)
        if models is None:
            return Counter[str]()
        while models and self._arrived.get(name, 0) < received:
            self._next_arrives(name, models)
        return Counter(models)

    def forget(self, name: str) -> None:
        """Forgets a session that has ended; the next one counts from 0."""
        self._models.pop(name, None)
        self._arrived.pop(name, None)

    def _next_arrives(self, name: str, models: deque[str]) -> None:
        models.popleft()
        self._arrived[name] = self._arrived.get(name, 0) + 1
