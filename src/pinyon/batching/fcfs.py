"""First come, first served: the order of arrival, as many as there are slots."""

from __future__ import annotations

from itertools import islice

from pinyon.batching.policy import BatchRequest

__all__ = ["Fcfs"]


class Fcfs:
    """See :class:`pinyon.batching.policy.BatchingPolicy`."""

    def __init__(self) -> None:
        self._waiting: dict[int, BatchRequest] = {}
        self._running: dict[int, BatchRequest] = {}

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    def enqueue(self, request: BatchRequest) -> None:
        if request.number in self._waiting or request.number in self._running:
            raise ValueError(f"request {request.number} is enqueued already")
        self._waiting[request.number] = request

    def admit(self, slots: int, now_s: float) -> list[int]:
        chosen = list(islice(self._waiting, max(0, slots)))
        for number in chosen:
            self._running[number] = self._waiting.pop(number)
        return chosen

    def remove(self, number: int) -> bool:
        return (self._waiting.pop(number, None) or self._running.pop(number, None)) is not None
