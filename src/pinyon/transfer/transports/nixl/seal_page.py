"""What peers that read by NIXL look at last: is what they were told still true?

As the seals of shm (:mod:`pinyon.transfer.transports.shm.seal`, where the order of loads and stores is argued), but in
one page, as NIXL reads registered memory only. A reader reads the seal by a second READ that begins when the first
has ended. By RDMA the same order holds: the NIC reads the seal after it has read the data, and what the owner stored
before he stored other bytes into the memory is seen before those (PCI Express keeps a device's reads coherent).
"""

from __future__ import annotations

import secrets

from pinyon.transfer.transports.nixl.agent import Buffer, NixlAgent
from pinyon.transfer.transports.nixl.wire import Page
from pinyon.transfer.transports.shm.seal import Seals
from pinyon.transfer.transports.shm.wire import SEAL_BYTES, Seal

PAGE_BYTES = 1 << 20


class SealPage(Seals):
    """A cell is where its 16 bytes begin in the page. The first one is the process's own. The page stays after
    ``close``, for READs that come late; nothing in it is intact then."""

    def __init__(self, agent: NixlAgent) -> None:
        """Raises NixlError."""
        self._buffer: Buffer = agent.new_buffer(PAGE_BYTES)
        self.registered = self._buffer.registered
        self._fresh = iter(range(0, PAGE_BYTES, SEAL_BYTES))
        self._unused: list[int] = []
        super().__init__()
        own = self._new_cell()
        assert own is not None  # of a fresh page
        self._own = own

    @property
    def page(self) -> Page:
        return Page(self._buffer.address, PAGE_BYTES, self._seal(self._own).value)

    def close(self) -> None:
        super().close()
        self._break(self._own)

    def _new_cell(self) -> int | None:
        cell = self._unused.pop() if self._unused else next(self._fresh, None)
        if cell is None:
            return None
        self._buffer.view[cell : cell + SEAL_BYTES] = secrets.token_bytes(SEAL_BYTES)
        return cell

    def _seal(self, cell: int) -> Seal:
        return Seal(self._buffer.address + cell, bytes(self._buffer.view[cell : cell + SEAL_BYTES]))

    def _break(self, cell: int) -> None:
        self._buffer.view[cell : cell + SEAL_BYTES] = bytes(SEAL_BYTES)

    def _free(self, cell: int) -> None:
        self._unused.append(cell)
