"""Leases: the right to read something until a time, during which it is not evicted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

from pinyon.core.errors import ResourceExhausted
from pinyon.eviction.ranked import Ranked

T = TypeVar("T")


class LeaseTable(Generic[T]):
    """The leases that are held, each with its items and deadline.

    The table holds names only: the caller takes the references and gives them back. Each process should draw
    ``first_id`` at random. Otherwise a reader's late release, meant for the process before a restart, might end another
    reader's lease. Times are monotonic seconds."""

    def __init__(self, *, first_id: int = 1, max_leases: int = 65536) -> None:
        if first_id < 1:
            raise ValueError(f"lease ids start at 1 or above, got {first_id}")
        self._next_id = first_id
        self._max_leases = max_leases
        self._leases: dict[int, list[T]] = {}
        self._deadlines: Ranked[int] = Ranked()
        """The leases that have not been named as overdue yet, by their ends."""

    def grant(self, items: Iterable[T], now_s: float, duration_s: float) -> int:
        """Returns the id (> 0) of a new lease that ends at ``now_s + duration_s``.

        Raises :class:`ResourceExhausted` at the limit; the caller then gives its references back."""
        if len(self._leases) >= self._max_leases:
            raise ResourceExhausted(f"{self._max_leases} leases are held", retry_after_s=1.0)
        lease_id = self._next_id
        self._next_id += 1
        self._leases[lease_id] = list(items)
        self._deadlines.put(lease_id, (now_s + duration_s,))
        return lease_id

    def items(self, lease_id: int) -> list[T] | None:
        """Returns what a lease is on, or None if it has ended."""
        return self._leases.get(lease_id)

    def renew(self, lease_id: int, now_s: float, duration_s: float) -> bool:
        """Moves a lease's end to ``now_s + duration_s``. Returns False if it has ended or is overdue."""
        end = self._deadlines.rank(lease_id)
        if end is None or end[0] <= now_s:
            return False
        self._deadlines.put(lease_id, (now_s + duration_s,))
        return True

    def release(self, lease_id: int) -> list[T] | None:
        """Ends a lease; returns its items, whose references the caller gives back, or None if it had ended before."""
        self._deadlines.take(lease_id)
        return self._leases.pop(lease_id, None)

    def overdue(self, now_s: float) -> list[int]:
        """Returns each lease whose time is up, once. It is held until :meth:`release`: shut out its readers first."""
        overdue: list[int] = []
        while (first := self._deadlines.first()) is not None and first[0][0] <= now_s:
            self._deadlines.take(first[1])
            overdue.append(first[1])
        return overdue

    def next_deadline(self) -> float | None:
        """Returns the earliest time at which :meth:`overdue` may find a lease; None when it will find none."""
        first = self._deadlines.first()
        return None if first is None else first[0][0]

    def __len__(self) -> int:
        return len(self._leases)
