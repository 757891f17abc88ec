"""Who gets KV memory next: a batching policy chooses among those that wait, and what it chooses is reserved.

Those that run are not kept waiting by those that wait: what is theirs grows (:func:`pinyon.decisions.make_room`), and
some blocks are left to them when others are admitted.

Whatever gives blocks back may make room for somebody: :meth:`Admission.admit` says for whom.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from pinyon.batching import BatchingPolicy, BatchRequest, BlockNeed, Needs, StepSeen
from pinyon.paging import BlockPool, Reservation, Reservations

__all__ = ["Admission", "Grant"]


class Grant(NamedTuple):
    """The blocks are those of the request with this number from now on."""

    number: int
    reservation: Reservation


class Admission:
    """``slots``: requests admitted at once that are decoded here. ``headroom``: blocks left to those that run."""

    def __init__(
        self,
        policy: Callable[[Needs], BatchingPolicy],
        pool: BlockPool,
        reservations: Reservations,
        slots: int,
        headroom: int,
    ) -> None:
        self._pool = pool
        self._reservations = reservations
        self._slots = slots
        self._headroom = headroom
        self._policy = policy(self._need)
        self._waiting: dict[int, BatchRequest] = {}
        self._decoded: set[int] = set()
        """Admitted ones that take a slot."""

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def admitted(self) -> int:
        """Requests admitted and not ended."""
        return self._policy.running

    def waits_since(self) -> float | None:
        """When the one that waits longest came. O(waiting)."""
        return min((request.arrived_s for request in list(self._waiting.values())), default=None)

    def enqueue(self, request: BatchRequest) -> None:
        """It waits for its blocks. Raises ``ValueError`` if its number is known or the pool can never have so many."""
        if request.blocks > self._pool.total:
            raise ValueError(f"{request.blocks} blocks are more than the pool's {self._pool.total}")
        self._policy.enqueue(request)
        self._waiting[request.number] = request

    def withdraw(self, number: int) -> None:
        """It does not wait any more. Raises ``KeyError`` if it does not."""
        del self._waiting[number]
        self._policy.remove(number)

    def end(self, number: int) -> None:
        """An admitted one has given its blocks back, or never will. Raises ``KeyError`` if it is none."""
        if number in self._waiting or not self._policy.remove(number):
            raise KeyError(number)
        self._decoded.discard(number)

    def admit(self, now_s: float) -> list[Grant]:
        """Those that have blocks from now on, in this order."""
        grants: list[Grant] = []
        while self._waiting:
            pool = self._pool
            room = pool.free + pool.cached - (self._headroom if pool.used else 0)
            chosen = self._policy.admit(self._slots - len(self._decoded), max(0, room), now_s)
            if not chosen:
                break
            grants += [self._grant(number, now_s) for number in chosen]
        return grants

    def _grant(self, number: int, now_s: float) -> Grant:
        request = self._waiting.pop(number)
        reservation = self._reservations.reserve(request.block_keys[: request.reusable], request.blocks, now_s)
        if reservation is None:
            raise RuntimeError("the batching policy admitted somebody for whom there is no room")
        if request.decodes:
            self._decoded.add(number)
        return Grant(number, reservation)

    def observe(self, step: StepSeen) -> None:
        self._policy.observe(step)

    def _need(self, request: BatchRequest) -> BlockNeed:
        return BlockNeed(*self._pool.need(request.block_keys[: request.reusable], request.blocks))

    def check_integrity(self) -> None:
        """Raises ``RuntimeError`` if the books do not balance. O(blocks): for idle moments and tests."""
        self._pool.check_integrity()
        if self._policy.waiting != len(self._waiting):
            raise RuntimeError("admission: the policy knows others than wait")
        if len(self._decoded) > min(self._slots, self._policy.running):
            raise RuntimeError("admission: more are decoded than there are slots, or than were admitted")
