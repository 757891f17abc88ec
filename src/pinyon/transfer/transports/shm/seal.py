"""Seals: what this process gives peers to prove that a key by which they read still opens what it did."""

from __future__ import annotations

import mmap
import secrets
import threading

import numpy as np

from pinyon.transfer.memory.grant import Grant
from pinyon.transfer.transports.shm import cma
from pinyon.transfer.transports.shm.wire import SEAL_BYTES, Seal


def new_page(seals: int) -> memoryview:
    """With room for so many, and one of the process's own; what is not used yet takes no memory."""
    return memoryview(mmap.mmap(-1, (seals + 1) * SEAL_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


class Seals:
    """16 random bytes in a page per grant that a peer asked for. A cell is where they begin.

    Why a READ that finds a grant's seal intact *after* its last byte did not see what came after ``revoke``:

    - owner: breaks the seal (stores zeros), passes ``cma.fence``, returns from ``revoke``; only then can the next
      user of the memory store into it.
    - reader: loads the data, then the seal, in this order (in one system call, or in a later one).

    If the reader loaded a byte that the next user stored, the zeros were stored before that byte, and the reader's
    later load of the seal sees them. On x86, because stores are seen in the program's order (streaming stores too: the
    lock below has locked instructions, which are full barriers) and loads are done in it. Elsewhere, because the fence
    puts a barrier into every running thread between the two stores: a reader has its data before it, or loads the seal
    after it. A seal's bytes need not be loaded at once: one old byte proves that its load came before the zeros.

    By RDMA (NIXL) the same order holds: the NIC reads the seal after it has read the data, and what the owner stored
    before he stored other bytes into the memory is seen before those (PCI Express keeps a device's reads coherent).
    """

    def __init__(self, page: memoryview) -> None:
        """``page``: stays after ``close``, for READs that come late; nothing in it is intact then."""
        self._page = page
        self._address = int(np.frombuffer(page, np.uint8).ctypes.data)
        self._lock = threading.Lock()
        self._fresh = iter(range(0, len(page), SEAL_BYTES))
        self._unused: list[int] = []
        self._cells: dict[Grant, int] = {}
        self._closed = False
        self.own = self._at(self._new_cell() or 0)
        """The process's."""

    def issue(self, grant: Grant) -> Seal | None:
        """The grant's seal. None: it is being revoked, or there is no room."""
        with self._lock:
            # Looked at under the lock: ``revoke`` comes after the grant died, and then nothing is issued any more.
            if self._closed or not grant.alive:
                return None
            cell = self._cells.get(grant) or self._new_cell()
            if cell is None:
                return None
            self._cells[grant] = cell
            return self._at(cell)

    def revoke(self, grant: Grant) -> None:
        """Break the grant's seal: on return no READ by a peer that is not over yet ends well."""
        with self._lock:
            cell = self._cells.pop(grant, None)
            if cell is not None:
                self._break(cell)
                cma.fence()  # used again afterwards: whatever comes there is not the 128 random bits
                self._unused.append(cell)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for cell in (0, *self._cells.values()):
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
