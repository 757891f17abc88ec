"""What peers may reach by RDMA: for each link, registrations of exactly what its peer was granted.

A NIC checks a key of 32 bits, which can be guessed. So each link has a protection domain of its own: a NIC's key works
for the queue pair of the link that asked for it and for no other, in the granted ranges and direction, until the grant
is revoked. A registration is a system call per range (docs/transfer.md has the figures), so it is made only for what a
peer asks for by RDMA.
"""

from __future__ import annotations

import threading
from typing import Any

from pinyon.transfer.memory.grant import Grant
from pinyon.transfer.transports.rdma.hca import Hca, register_memory
from pinyon.transfer.transports.rdma.verbs import free, pyverbs, verb
from pinyon.transfer.transports.rdma.wire import RegionGrant


class LentTable:
    """Which links hold something of which grant. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._links: dict[Grant, set[LentMemory]] = {}

    def note(self, grant: Grant, link: LentMemory) -> bool:
        """The link is about to lend it. False: it is being revoked."""
        with self._lock:
            # Under the lock: ``take_back`` comes after the grant died, and then nothing is lent any more.
            if not grant.alive:
                return False
            grant.lent = True
            self._links.setdefault(grant, set()).add(link)
            return True

    def forget(self, grants: list[Grant], link: LentMemory) -> None:
        """The link has ended."""
        with self._lock:
            for grant in grants:
                links = self._links.get(grant)
                if links is not None:
                    links.discard(link)
                    if not links:
                        del self._links[grant]

    def take_back(self, grant: Grant) -> None:
        """On return no NIC lets a peer touch anything for this grant."""
        with self._lock:
            links = self._links.pop(grant, set())
        for link in links:
            link.take_back(grant)


class LentMemory:
    """One link's protection domain and what is registered in it."""

    def __init__(self, hca: Hca, table: LentTable) -> None:
        """Raises :class:`VerbsError` when the HCA has no room."""
        self._table = table
        self._lock = threading.Lock()
        self._lent: dict[Grant, tuple[list[Any], RegionGrant]] = {}
        with verb(f"no protection domain on {hca.nic.name}"):
            self.pd = pyverbs().PD(hca.context)

    def lend(self, grant: Grant) -> RegionGrant | None:
        """What the peer must know, made at first use; it ends with the grant or the link. None: being revoked. Raises
        VerbsError: the NIC has no room."""
        with self._lock:
            known = self._lent.get(grant)
            if known is not None:
                return known[1]
            if not self._table.note(grant, self):
                return None
            handles: list[Any] = []
            keys: list[tuple[int, int]] = []
            try:
                for start, end in zip(*grant.spans, strict=True):
                    handle, address = register_memory(self.pd, grant.region, start, end - start, grant.access)
                    handles.append(handle)
                    keys.append((handle.rkey, address))
            except BaseException:
                for handle in handles:
                    free(handle)
                raise
            made = RegionGrant(0, grant.rights, grant.spans, tuple(keys))
            self._lent[grant] = handles, made
            return made

    def take_back(self, grant: Grant) -> None:
        """On return the NIC refuses the keys that were lent for it."""
        with self._lock:
            handles, _ = self._lent.pop(grant, ((), None))
            for handle in handles:
                free(handle)

    def close(self) -> None:
        """After the link's queue pair."""
        with self._lock:
            grants, lent = list(self._lent), list(self._lent.values())
            self._lent.clear()
            for handles, _ in lent:
                for handle in handles:
                    free(handle)
            free(self.pd)
        self._table.forget(grants, self)
