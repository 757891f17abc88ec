"""Seals: what this process gives peers to prove that a key by which they read still opens what it did."""

from __future__ import annotations

import secrets
import threading
from array import array
from typing import Any

from pinyon.transfer.memory.grant import Grant
from pinyon.transfer.transports.shm import cma
from pinyon.transfer.transports.shm.wire import SEAL_BYTES, Seal

Cell = Any
"""Where a seal lies: here an array of its own, elsewhere what a class derived from this one makes."""


class Seals:
    """16 random bytes in plain memory per grant that a peer asked for.

    Why a READ that finds a grant's seal intact *after* its last byte did not see what came after ``revoke``:

    - owner: breaks the seal (stores zeros), passes ``cma.fence``, returns from ``revoke``; only then can the next
      user of the memory store into it.
    - reader: loads the data, then the seal, in this order (in one system call, or in a later one).

    If the reader loaded a byte that the next user stored, the zeros were stored before that byte, and the reader's
    later load of the seal sees them. On x86, because stores are seen in the program's order (streaming stores too: the
    lock below has locked instructions, which are full barriers) and loads are done in it. Elsewhere, because the fence
    puts a barrier into every running thread between the two stores: a reader has its data before it, or loads the seal
    after it. A seal's bytes need not be loaded at once: one old byte proves that its load came before the zeros.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cells: dict[Grant, Cell] = {}
        self._closed = False

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
            return self._seal(cell)

    def revoke(self, grant: Grant) -> None:
        """Break the grant's seal: on return no READ by a peer that is not over yet ends well."""
        with self._lock:
            cell = self._cells.pop(grant, None)
            if cell is not None:
                self._break(cell)
                cma.fence()  # freed afterwards: whatever comes there is not the 128 random bits
                self._free(cell)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for cell in self._cells.values():
                self._break(cell)
            cma.fence()
            self._cells.clear()

    # What one cell is.

    def _new_cell(self) -> Cell:
        return array("Q", secrets.token_bytes(SEAL_BYTES))

    def _seal(self, cell: Cell) -> Seal:
        return Seal(cell.buffer_info()[0], cell.tobytes())

    def _break(self, cell: Cell) -> None:
        for position in range(len(cell)):
            cell[position] = 0

    def _free(self, cell: Cell) -> None:
        """Nobody is told of it any more."""
