"""A policy that admits in order of arrival, but holds back some of the slots and of the room."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from pinyon.batching.fcfs import Fcfs
from pinyon.batching.policy import BatchRequest, BlockNeed, HeldBlocks, StepSeen
from pinyon.core.block_keys import BlockKey


class Bounded(NamedTuple):
    """The slots and blocks that waiting requests may take; if a number is less than one, they may take none."""

    slots: int
    room_blocks: int


class AdmissionBound(Protocol):
    """A bound on admission. If no request is admitted, it must leave all of the room, so that one can be."""

    def within(self, slots: int, room_blocks: int) -> Bounded:
        """Returns the part of these free slots and blocks that may be used now."""
        ...

    def admitted(self, request: BatchRequest) -> None: ...

    def ended(self, number: int) -> None:
        """Notes that an admitted request has ended or given way."""
        ...

    def observe(self, step: StepSeen) -> None:
        """Notes the result of a step."""
        ...


class BoundedFcfs(Fcfs):
    """First come, first served, within the ``bound``."""

    def __init__(self, holdings: HeldBlocks, bound: AdmissionBound) -> None:
        super().__init__(holdings)
        self._bound = bound
        self._asked: dict[int, BatchRequest] = {}
        """The waiting requests."""

    def enqueue(self, request: BatchRequest) -> None:
        super().enqueue(request)
        self._asked[request.number] = request

    def adopt(self, request: BatchRequest, now_s: float) -> None:
        super().adopt(request, now_s)
        self._bound.admitted(request)

    def admit(self, slots: int, room_blocks: int, now_s: float) -> list[int]:
        slots, room_blocks = self._bound.within(slots, room_blocks)
        chosen = super().admit(slots, room_blocks, now_s)
        for number in chosen:
            self._bound.admitted(self._asked.pop(number))
        return chosen

    def remove(self, number: int) -> bool:
        known = super().remove(number)
        if self._asked.pop(number, None) is None and known:
            self._bound.ended(number)
        return known

    def observe(self, step: StepSeen) -> None:
        self._bound.observe(step)


class DoubleCounting:
    """Holdings in which no request takes over blocks, and the matching :class:`AdmissionBound`.

    Blocks that running requests share are subtracted from the room as often as sharing saved them; see
    :class:`pinyon.batching.policy.HeldBlocks`. Memory and time: O(reusable keys) of the running requests."""

    def __init__(self, holdings: HeldBlocks) -> None:
        self._holdings = holdings
        self._shared: dict[int, tuple[BlockKey, ...]] = {}
        """The keys of each running request whose blocks it may share with others."""
        self._users: dict[BlockKey, int] = {}
        self._saved = 0
        """The number of additional blocks that would be needed if requests did not share."""

    def need(self, request: BatchRequest) -> BlockNeed:
        return BlockNeed(0, request.blocks)

    def behind(self, number: int) -> int:
        return self._holdings.behind(number)

    def within(self, slots: int, room_blocks: int) -> Bounded:
        return Bounded(slots, room_blocks - self._saved)

    def admitted(self, request: BatchRequest) -> None:
        users = self._users
        self._shared[request.number] = keys = request.block_keys[: request.reusable]
        for key in keys:
            count = users.get(key, 0)
            users[key] = count + 1
            self._saved += count > 0

    def ended(self, number: int) -> None:
        users = self._users
        for key in self._shared.pop(number):
            count = users[key] - 1
            if count:
                users[key] = count
                self._saved -= 1
            else:
                del users[key]

    def observe(self, step: StepSeen) -> None:
        """Does nothing: this bound does not depend on steps."""
