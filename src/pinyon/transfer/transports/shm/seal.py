"""Seals, by which peers prove that a key by which they read still opens what it did."""

from __future__ import annotations

import mmap
import secrets
import threading

import numpy as np

from pinyon.transfer.memory.grant import Grant
from pinyon.transfer.transports.shm import cma
from pinyon.transfer.transports.shm.wire import SEAL_BYTES, Seal


class Seals:
    """Random bytes, 16 for each grant that a peer asked for, in one page. A cell is the offset at which they begin.

    A READ that finds a grant's seal intact *after* its last byte saw nothing that was stored after ``revoke``:

    - owner: breaks the seal (stores zeros), passes ``cma.fence``, returns from ``revoke``; only then can the next
      user of the memory store into it.
    - reader: loads the data, then the seal, in this order (in one system call, or in a later one).

    If the reader loaded a byte that the next user stored, the zeros were stored before that byte, and the reader's
    later load of the seal sees them. On x86 this holds because stores are seen in the program's order and loads are
    done in it. Streaming stores are in order too: the lock below has locked instructions, which are full barriers.
    Elsewhere the fence puts a barrier into every running thread between the two stores: a reader has its data before
    the barrier, or loads the seal after it. A seal's bytes need not be loaded at once: one old byte proves that its
    load came before the zeros."""

    def __init__(self, most: int) -> None:
        """Makes room for ``most`` seals; cells that are not used yet take no memory.

        The page stays after ``close`` for READs that come late; no seal in it is intact then."""
        size = most * SEAL_BYTES
        page = self._page = memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        self._address = int(np.frombuffer(page, np.uint8).ctypes.data)
        self._lock = threading.Lock()
        self._fresh = iter(range(0, size, SEAL_BYTES))
        self._unused: list[int] = []
        self._cells: dict[Grant, int] = {}
        self._closed = False

    def issue(self, grant: Grant) -> Seal | None:
        """Returns the grant's seal, or None if the grant is being revoked or there is no room."""
        with self._lock:
            # Checked under the lock: ``revoke`` is called after the grant died, and from then on no seal is issued.
            if self._closed or not grant.alive:
                return None
            cell = self._cells.get(grant)
            if cell is None:
                cell = self._new_cell()
            if cell is None:
                return None
            self._cells[grant] = cell
            return self._at(cell)

    def revoke(self, grant: Grant) -> None:
        """Breaks the grant's seal. Once this returns, no READ by a peer that is still running ends well."""
        with self._lock:
            cell = self._cells.pop(grant, None)
            if cell is not None:
                self._break(cell)
                cma.fence()  # before the cell is used again, for content that is not the 128 random bits
                self._unused.append(cell)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for cell in self._cells.values():
                self._break(cell)
            cma.fence()
            self._cells.clear()

    def _new_cell(self) -> int | None:
        cell = self._unused.pop() if self._unused else next(self._fresh, None)
        if cell is not None:
            self._page[cell : cell + SEAL_BYTES] = secrets.token_bytes(SEAL_BYTES)
        return cell

    def _at(self, cell: int) -> Seal:
        return Seal(self._address + cell, bytes(self._page[cell : cell + SEAL_BYTES]))

    def _break(self, cell: int) -> None:
        self._page[cell : cell + SEAL_BYTES] = bytes(SEAL_BYTES)
