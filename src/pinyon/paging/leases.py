"""Leases: the right to read something until a time, during which it is not evicted."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from typing import Generic, TypeVar

from pinyon.core.errors import ResourceExhausted

T = TypeVar("T")


class LeaseTable(Generic[T]):
    """The leases that are held, each with its items and deadline.

    The table holds names only: the caller took the references and gives them back. ``first_id`` should be drawn at
    random by the process. Otherwise a reader's late release, meant for the process before a restart, might end another
    reader's lease. Times are monotonic seconds.
    """

    def __init__(self, *, first_id: int = 1, max_leases: int = 65536) -> None:
        if first_id < 1:
            raise ValueError(f"lease ids start at 1 or above, got {first_id}")
        self._next_id = first_id
        self._max_leases = max_leases
        self._leases: dict[int, tuple[float, list[T]]] = {}
        self._deadlines: list[tuple[float, int]] = []

    def grant(self, items: Iterable[T], now_s: float, duration_s: float) -> int:
        """Returns the id (> 0) of a new lease that ends at ``now_s + duration_s``.

        Raises :class:`ResourceExhausted` at the limit; the caller then gives its references back.
        """
        if len(self._leases) >= self._max_leases:
            raise ResourceExhausted(f"{self._max_leases} leases are held", retry_after_s=1.0)
        lease_id = self._next_id
        self._next_id += 1
        deadline = now_s + duration_s
        self._leases[lease_id] = (deadline, list(items))
        if len(self._deadlines) > 2 * len(self._leases) + 64:  # mostly leases that were released early
            self._deadlines = [(end, each) for each, (end, _) in self._leases.items() if end < math.inf]
            heapq.heapify(self._deadlines)
        else:
            heapq.heappush(self._deadlines, (deadline, lease_id))
        return lease_id

    def release(self, lease_id: int) -> list[T] | None:
        """Ends a lease; returns its items, whose references the caller gives back, or None if it had ended before."""
        lease = self._leases.pop(lease_id, None)
        return None if lease is None else lease[1]

    def overdue(self, now_s: float) -> list[int]:
        """Returns each lease whose time is up, once. It is held until :meth:`release`: first shut out its readers."""
        overdue = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            lease_id = heapq.heappop(self._deadlines)[1]
            lease = self._leases.get(lease_id)
            if lease is not None:
                self._leases[lease_id] = (math.inf, lease[1])
                overdue.append(lease_id)
        return overdue

    def next_deadline(self) -> float | None:
        """Returns the earliest time at which :meth:`overdue` may find a lease; None when it will find none."""
        while self._deadlines and self._deadlines[0][1] not in self._leases:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def __len__(self) -> int:
        return len(self._leases)
