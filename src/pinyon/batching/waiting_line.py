"""Lines of requests that wait for KV memory, in the order in which they are asked whether there is room for them."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass

from pinyon.batching.interface import ServiceOrder
from pinyon.batching.policy import BatchRequest
from pinyon.batching.service_order import MostInTimeSettings

SLO_SHARE = 0.5
"""The share of the time to a request's deadline for which it may be passed over: the rest is for its prompt."""
KEPT_S = 0.05
"""Seconds for which turns stay valid: a look at a long line costs a millisecond, and deadlines are seconds away."""


@dataclass(frozen=True, slots=True)
class RoomInTimeSettings(MostInTimeSettings):
    """Options of :class:`ByTurn`; see :class:`MostInTimeSettings`.

    Whatever its SLO, a request counts as aged after ``patience_s`` plus ``age_s`` at most. That is before a worker
    refuses it (the worker's ``room_timeout_s``, 20)."""

    age_s: float = 10.0
    patience_s: float = 5.0


def passed_over_max_s(request: BatchRequest, most_s: float) -> float:
    """Returns how long others may go before a request: ``most_s``, or less if its first token would be late."""
    if not request.deadline_s:
        return most_s
    return min(most_s, max(0.0, SLO_SHARE * (request.deadline_s - request.arrived_s)))


class _Line:
    """A base class with the methods of :class:`pinyon.batching.interface.WaitingLine` that most lines do not need."""

    def begin(self, now_s: float, room_blocks: int) -> None:
        pass

    def end(self) -> None:
        pass

    def adopt(self, request: BatchRequest) -> None:
        pass

    def passed_over_s(self, number: int) -> float:
        return 0.0

    def ended(self, number: int) -> None:
        pass


class ByNumber(_Line):
    """A line in order of arrival: the smallest number first."""

    def __init__(self) -> None:
        self._waiting: dict[int, BatchRequest] = {}
        self._order: list[int] = []
        """The numbers in order; nearly all new numbers come at the end."""

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, number: int) -> bool:
        return number in self._waiting

    def get(self, number: int) -> BatchRequest | None:
        """Returns a waiting request, or None."""
        return self._waiting.get(number)

    def add(self, request: BatchRequest, again: bool) -> None:
        self._waiting[request.number] = request
        insort(self._order, request.number)

    def remove(self, number: int) -> bool:
        if self._waiting.pop(number, None) is None:
            return False
        del self._order[bisect_left(self._order, number)]
        return True

    def at(self, place: int) -> BatchRequest | None:
        order = self._order
        return self._waiting[order[place]] if place < len(order) else None

    def take(self, number: int, room_blocks: int) -> None:
        self.remove(number)

    def claims(self, number: int) -> bool:
        return True


class AgainFirst(_Line):
    """A base class of lines where requests that gave way come first, in order of arrival, before the new ones.

    Only requests that gave way may claim the room of running ones. A new request may have come long before requests
    whose turn was earlier. If it could claim room, it would displace all that the line let in before it."""

    def __init__(self) -> None:
        self._again = ByNumber()
        self._new: dict[int, BatchRequest] = {}

    def __len__(self) -> int:
        return len(self._again) + len(self._new)

    def __contains__(self, number: int) -> bool:
        return number in self._new or number in self._again

    def claims(self, number: int) -> bool:
        return number in self._again


class ByTurn(AgainFirst):
    """Requests that gave way, in order of arrival, then the new ones by ``order``, which belongs to this line alone.

    The line is asked at every release, and nearly always there is no room. So it asks the order for turns only while
    some request could fit. Turns stay valid for ``KEPT_S``, or until a new request could change them."""

    def __init__(self, order: ServiceOrder[int]) -> None:
        super().__init__()
        self._order = order
        self._least: list[int] = []
        """The least number of blocks that each new request takes out of the room, sorted."""
        self._now_s = 0.0
        self._room = 0
        self._turns: Iterator[int] | None = None
        """The turns that follow those in ``_seen`` and ``_known``."""
        self._known: set[int] = set()
        self._seen: list[int] = []
        """Requests in order of their turns, as far as asked for, without those that were taken or left."""
        self._seen_s = 0.0
        """The time when the first of them was asked for."""
        self._newcomer: int | None = None
        """The least number of blocks that any request takes that came since; None: none came."""
        self._taken: list[int] = []

    def add(self, request: BatchRequest, again: bool) -> None:
        if again:
            self._again.add(request, again)
            return
        self._new[request.number] = request
        least = _least_blocks(request)
        insort(self._least, least)
        self._newcomer = least if self._newcomer is None else min(self._newcomer, least)
        self._order.add(request.number, request.arrived_s, request.seconds, request.deadline_s or math.inf)

    def remove(self, number: int) -> bool:
        if number not in self._new:
            return self._again.remove(number)
        self._pop(number)
        self._order.remove(number)
        return True

    def _pop(self, number: int) -> None:
        del self._least[bisect_left(self._least, _least_blocks(self._new.pop(number)))]
        if number in self._seen:
            self._seen.remove(number)

    def begin(self, now_s: float, room_blocks: int) -> None:
        # A newcomer that does not fit may hold others up, but only if there is more room than at the last look.
        matters = self._newcomer is not None and (self._newcomer <= room_blocks or room_blocks > self._room)
        self._now_s, self._room = now_s, room_blocks
        if matters or not self._seen or now_s - self._seen_s >= KEPT_S:
            self._seen.clear()
            self._newcomer = None

    def at(self, place: int) -> BatchRequest | None:
        request = self._again.at(place)
        if request is not None:
            return request
        place -= len(self._again)
        if place >= len(self._new) or self._least[0] > self._room:
            return None
        while place >= len(self._seen):  # lazily, as each turn is costly
            self._look()
        return self._new[self._seen[place]]

    def _look(self) -> None:
        """Asks for one more turn; there must be one."""
        if not self._seen and not self._taken:
            self._seen_s = self._now_s
        # A compiled generator expression would ask for all turns at once.
        if self._turns is None:
            self._known = {*self._seen, *self._taken}
            self._turns = self._order.turns(self._now_s)
        number = next(self._turns)
        while number in self._known:
            number = next(self._turns)
        self._seen.append(number)

    def take(self, number: int, room_blocks: int) -> None:
        self._room = room_blocks
        if not self._again.remove(number):
            self._pop(number)
            self._taken.append(number)

    def end(self) -> None:
        for number in self._taken:
            self._order.take(number, self._now_s)
        self._turns = None
        self._taken.clear()


def _least_blocks(request: BatchRequest) -> int:
    """Returns the blocks that the request takes if other requests use all blocks that it may reuse."""
    return request.blocks - request.reusable
