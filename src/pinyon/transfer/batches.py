"""Batches by number, as Mooncake's Listing 1 names them."""

from __future__ import annotations

import itertools
import threading

from pinyon.transfer.handle import TransferHandle
from pinyon.transfer.types.errors import InvalidTransfer, TransferError, TransferLimitReached

__all__ = ["Batches"]


class Batches:
    """At most ``limit``. For any thread."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._handles: dict[int, TransferHandle] = {}
        self._ids = itertools.count(1)

    def add(self, handle: TransferHandle) -> int:
        """Its number. Raises :class:`TransferLimitReached`."""
        with self._lock:
            if len(self._handles) >= self._limit:
                raise TransferLimitReached(f"{self._limit} batches are allocated")
            batch_id = next(self._ids)
            self._handles[batch_id] = handle
        return batch_id

    def get(self, batch_id: int) -> TransferHandle:
        """Raises :class:`InvalidTransfer` for a number that no batch has."""
        handle = self._handles.get(batch_id)
        if handle is None:
            raise InvalidTransfer(f"no batch {batch_id}", field="batch_id")
        return handle

    def free(self, batch_id: int) -> None:
        """Raises :class:`InvalidTransfer`, and :class:`TransferError` while requests are in flight."""
        handle = self.get(batch_id)
        if not handle.done and not handle.final:  # whoever saw the last status may free the batch
            raise TransferError("requests of the batch are still in flight")
        with self._lock:
            self._handles.pop(batch_id, None)
