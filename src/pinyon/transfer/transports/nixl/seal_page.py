"""What peers that read by NIXL look at last: is what they were told still true?

As the seals of shm (:mod:`pinyon.transfer.transports.shm.seal`, where the order of loads and stores is argued), but in
one page, as NIXL reads registered memory only. A reader reads the seal by a second READ that begins when the first
has ended. By RDMA the same order holds: the NIC reads the seal after it has read the data, and what the owner stored
before he stored other bytes into the memory is seen before those (PCI Express keeps a device's reads coherent).
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable

from pinyon.transfer.memory.grant import Grant
from pinyon.transfer.transports.nixl.agent import Buffer, NixlAgent
from pinyon.transfer.transports.nixl.wire import SEAL_BYTES, Page, Seal
from pinyon.transfer.transports.shm import cma

__all__ = ["PAGE_BYTES", "SealPage"]

PAGE_BYTES = 1 << 20
_CELLS = PAGE_BYTES // SEAL_BYTES
_BROKEN = bytes(SEAL_BYTES)


class SealPage:
    """16 random bytes per grant that a peer asked for; the first are the process's own. Thread-safe."""

    def __init__(self, agent: NixlAgent, fence: Callable[[], None] = cma.fence) -> None:
        """Raises NixlError."""
        self._buffer: Buffer = agent.new_buffer(PAGE_BYTES)
        self.registered = self._buffer.registered
        self._fence = fence
        self._lock = threading.Lock()
        self._cells: dict[Grant, int] = {}
        self._free: list[int] = []
        self._used = 1
        self._closed = False
        self._buffer.view[:SEAL_BYTES] = secrets.token_bytes(SEAL_BYTES)

    @property
    def page(self) -> Page:
        return Page(self._buffer.address, PAGE_BYTES, bytes(self._buffer.view[:SEAL_BYTES]))

    def issue(self, grant: Grant) -> Seal | None:
        """The grant's seal. None: it is being revoked, or there is no room."""
        with self._lock:
            # Looked at under the lock: ``revoke`` comes after the grant died, and then nothing is issued any more.
            if self._closed or not grant.alive:
                return None
            cell = self._cells.get(grant)
            if cell is None:
                cell = self._new_cell()
                if not cell:
                    return None
                self._cells[grant] = cell
            at = cell * SEAL_BYTES
            return Seal(self._buffer.address + at, bytes(self._buffer.view[at : at + SEAL_BYTES]))

    def _new_cell(self) -> int:
        """Lock held. 0: all are taken."""
        if self._free:
            cell = self._free.pop()
        elif self._used < _CELLS:
            cell = self._used
            self._used += 1
        else:
            return 0
        self._buffer.view[cell * SEAL_BYTES : (cell + 1) * SEAL_BYTES] = secrets.token_bytes(SEAL_BYTES)
        return cell

    def revoke(self, grant: Grant) -> None:
        """Break the grant's seal: on return no READ by a peer that is not over yet ends well."""
        with self._lock:
            cell = self._cells.pop(grant, 0)
            if cell:
                self._break(cell)
                self._free.append(cell)
        if cell:
            self._fence()

    def _break(self, cell: int) -> None:
        self._buffer.view[cell * SEAL_BYTES : (cell + 1) * SEAL_BYTES] = _BROKEN

    def close(self) -> None:
        """The page stays, for READs that come late; nothing in it is intact any more."""
        with self._lock:
            self._closed = True
            for cell in [0, *self._cells.values()]:
                self._break(cell)
            self._cells.clear()
        self._fence()
