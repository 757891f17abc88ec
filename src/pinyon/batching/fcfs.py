"""First come, first served: nobody overtakes a request that waits for room."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from pinyon.batching.policy import BatchRequest, Needs, StepSeen

__all__ = ["Fcfs"]


class _Line:
    """Requests by their numbers, the smallest first."""

    def __init__(self) -> None:
        self.waiting: dict[int, BatchRequest] = {}
        self._order: list[int] = []
        """A heap of the numbers that wait, and of some that do not any more."""

    def add(self, request: BatchRequest) -> None:
        self.waiting[request.number] = request
        heappush(self._order, request.number)

    def first(self) -> BatchRequest | None:
        order, waiting = self._order, self.waiting
        while order and order[0] not in waiting:
            heappop(order)
        if len(order) > 2 * len(waiting) + 64:
            self._order = order = list(waiting)
            heapify(order)
        return waiting[order[0]] if order else None


class Fcfs:
    """See :class:`pinyon.batching.policy.BatchingPolicy`. Who lacks a slot only does not stop those that need none."""

    def __init__(self, needs: Needs) -> None:
        self._needs = needs
        self._decoded, self._foreign = _Line(), _Line()
        self._running: set[int] = set()

    @property
    def waiting(self) -> int:
        return len(self._decoded.waiting) + len(self._foreign.waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    def enqueue(self, request: BatchRequest) -> None:
        number = request.number
        if number in self._decoded.waiting or number in self._foreign.waiting or number in self._running:
            raise ValueError(f"request {number} is enqueued already")
        (self._decoded if request.decodes else self._foreign).add(request)

    def admit(self, slots: int, room_blocks: int, now_s: float) -> list[int]:
        chosen: list[int] = []
        while (request := self._next(slots)) is not None:
            # Asked at every release for the one in front: it must cost little while there is no room.
            if request.blocks - request.reusable > room_blocks:
                break
            missing = self._needs(request).missing
            if missing > room_blocks:
                break
            room_blocks -= missing
            slots -= request.decodes
            line = self._decoded if request.decodes else self._foreign
            del line.waiting[request.number]
            self._running.add(request.number)
            chosen.append(request.number)
        return chosen

    def _next(self, slots: int) -> BatchRequest | None:
        foreign = self._foreign.first()
        decoded = self._decoded.first() if slots > 0 else None
        if foreign is None or decoded is None:
            return foreign or decoded
        return min(foreign, decoded, key=lambda request: request.number)

    def remove(self, number: int) -> bool:
        for line in (self._decoded, self._foreign):
            if line.waiting.pop(number, None) is not None:
                return True
        if number not in self._running:
            return False
        self._running.remove(number)
        return True

    def observe(self, step: StepSeen) -> None:
        """It does not depend on that."""
