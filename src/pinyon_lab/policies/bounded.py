"""A policy that admits as others come, and holds back some of the slots and of the room."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from pinyon.batching.fcfs import Fcfs
from pinyon.batching.policy import BatchRequest, Holdings, StepSeen

__all__ = ["AdmissionBound", "Bounded", "BoundedFcfs"]


class Bounded(NamedTuple):
    """What those that wait may take; nothing where it is less than one."""

    slots: int
    room_blocks: int


class AdmissionBound(Protocol):
    """Where nobody is admitted, all of the room must be left: else nobody would ever be."""

    def within(self, slots: int, room_blocks: int) -> Bounded:
        """Of so much, as of now."""
        ...

    def admitted(self, request: BatchRequest) -> None: ...

    def ended(self, number: int) -> None:
        """One that was admitted is not any more."""
        ...

    def observe(self, step: StepSeen) -> None:
        """What a step has brought."""
        ...


class BoundedFcfs:
    """See :class:`pinyon.batching.interface.BatchingPolicy`: first come, first served, within the ``bound``."""

    def __init__(self, holdings: Holdings, bound: AdmissionBound) -> None:
        self._fcfs, self._bound = Fcfs(holdings), bound
        self._waiting: dict[int, BatchRequest] = {}

    @property
    def waiting(self) -> int:
        return self._fcfs.waiting

    @property
    def running(self) -> int:
        return self._fcfs.running

    def enqueue(self, request: BatchRequest) -> None:
        self._fcfs.enqueue(request)
        self._waiting[request.number] = request

    def adopt(self, request: BatchRequest, now_s: float) -> None:
        self._fcfs.adopt(request, now_s)
        self._bound.admitted(request)

    def admit(self, slots: int, room_blocks: int, now_s: float) -> list[int]:
        chosen = self._fcfs.admit(*self._bound.within(slots, room_blocks), now_s)
        for number in chosen:
            self._bound.admitted(self._waiting.pop(number))
        return chosen

    def claimant(self) -> int | None:
        return self._fcfs.claimant()

    def passed_over_s(self, number: int) -> float:
        return self._fcfs.passed_over_s(number)

    def gave_way(self, number: int) -> bool:
        return self._fcfs.gave_way(number)

    def remove(self, number: int) -> bool:
        known = self._fcfs.remove(number)
        if self._waiting.pop(number, None) is None and known:
            self._bound.ended(number)
        return known

    def observe(self, step: StepSeen) -> None:
        self._bound.observe(step)
