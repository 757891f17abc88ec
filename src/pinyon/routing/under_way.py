"""Requests that were sent to another load balancer and had not arrived when it told last."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping

KEPT_MAX = 1 << 16
"""To one of them, that it has not counted; older ones count as arrived."""


class UnderWay:
    """It says how many have arrived of all models together; what its credits are worth is of each. Requests of one
    session arrive in the order they were sent in."""

    def __init__(self) -> None:
        self._models: dict[str, deque[str]] = {}
        self._arrived: dict[str, int] = {}

    def sent(self, name: str, model: str) -> None:
        """To that load balancer."""
        models = self._models.get(name)
        if models is None:
            models = self._models[name] = deque()
        models.append(model)
        if len(models) > KEPT_MAX:
            self._next_arrives(name, models)

    def told(self, name: str, received: int) -> Mapping[str, int]:
        """It has received so many of ours in this session: how many are under way, by model (0: not in it)."""
        models = self._models.get(name)
        if models is None:
            return Counter[str]()
        while models and self._arrived.get(name, 0) < received:
            self._next_arrives(name, models)
        return Counter(models)

    def forget(self, name: str) -> None:
        """Its session has ended: the next one begins to count anew."""
        self._models.pop(name, None)
        self._arrived.pop(name, None)

    def _next_arrives(self, name: str, models: deque[str]) -> None:
        models.popleft()
        self._arrived[name] = self._arrived.get(name, 0) + 1
