"""The puts that were begun and not ended, with their deadlines. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from pinyon.core.errors import ResourceExhausted
from pinyon.store.kv_object import KvObject, Put


class OpenPuts:
    """A table of at most ``most`` open puts, whose ids go up from ``first_id``. Times are monotonic seconds."""

    def __init__(self, first_id: int, most: int) -> None:
        self._next_id = first_id
        self._most = most
        self._puts: dict[int, Put] = {}
        self._deadlines: list[tuple[float, int]] = []

    def check_room(self) -> None:
        """Raises :class:`ResourceExhausted` if no other put may be begun."""
        if len(self._puts) >= self._most:
            raise ResourceExhausted(f"{self._most} puts are open", retry_after_s=1.0)

    def begin(self, objects: list[KvObject], deadline_s: float) -> int:
        """Begins a put and returns its id."""
        put = Put(self._next_id, objects, deadline_s)
        self._next_id += 1
        self._puts[put.put_id] = put
        heapq.heappush(self._deadlines, (put.deadline_s, put.put_id))
        return put.put_id

    def close(self, put_id: int) -> bool:
        """Begins to end a put. Returns False if it is unknown, over, or closing already."""
        put = self._puts.get(put_id)
        if put is None or put.closing:
            return False
        put.closing = True
        return True

    def close_overdue(self, now_s: float) -> list[int]:
        """Begins to end the puts whose time is up, and returns their ids."""
        overdue = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            put_id = heapq.heappop(self._deadlines)[1]
            if self.close(put_id):
                overdue.append(put_id)
        return overdue

    def end(self, put_id: int) -> Put:
        """Takes a put out of the table. Raises ``ValueError`` if it is not closing."""
        put = self._puts[put_id]
        if not put.closing:
            raise ValueError(f"put {put_id} is not closing")
        del self._puts[put_id]
        if len(self._deadlines) > 2 * len(self._puts) + 64:  # mostly puts that ended in time
            self._deadlines = [(each.deadline_s, each.put_id) for each in self._puts.values()]
            heapq.heapify(self._deadlines)
        return put

    def next_deadline_s(self) -> float | None:
        """Returns the earliest time at which a put may be overdue."""
        return self._deadlines[0][0] if self._deadlines else None

    def __len__(self) -> int:
        """Counts the puts, including those that are closing."""
        return len(self._puts)

    def __iter__(self) -> Iterator[Put]:
        return iter(self._puts.values())
