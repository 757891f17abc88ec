"""TCP: threads with blocking sockets, payload straight between sockets and registered memory.

Threads and not asyncio, because the process's event loop and its engine thread share the GIL: here a megabyte costs a
few system calls, during which the GIL is free.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping

from pinyon.core.clock import Clock
from pinyon.transfer.links.dialer import dial
from pinyon.transfer.links.endpoints import Endpoints
from pinyon.transfer.links.handshake import Service
from pinyon.transfer.links.identity import Identity
from pinyon.transfer.memory.table import MemoryTable
from pinyon.transfer.transports.tcp.checksum import is_on
from pinyon.transfer.transports.tcp.client import Connection
from pinyon.transfer.transports.tcp.server import TcpService
from pinyon.transfer.types.limits import TransferLimits
from pinyon.transfer.types.nic import Nic
from pinyon.transfer.types.path import Path
from pinyon.transfer.types.segment import SegmentDescriptor
from pinyon.transfer.types.stats import Meter

__all__ = ["TcpTransport"]


class TcpTransport(Endpoints[Connection]):
    """Initiator side; ``service`` is the other one."""

    name = "tcp"

    def __init__(
        self,
        memory: MemoryTable,
        limits: TransferLimits,
        identity: Identity,
        meter: Meter,
        nics: Mapping[str, Nic],
        *,
        checksum: str = "on",
        clock: Clock = time.monotonic,
    ) -> None:
        """
        Args:
            nics: this host's, by name.
            checksum: "on" or "off".

        Raises:
            InvalidTransfer: no such checksum mode.
        """
        super().__init__(limits.connections_per_peer, limits, meter, clock)
        self.moves_bytes = limits.max_frame_bytes
        self._memory = memory
        self._identity = identity
        self._nics = nics
        networks = Counter(nic.network for nic in nics.values() if nic.transport == "tcp")
        self._crowded = {network for network, count in networks.items() if count > 1}
        """Networks on which we have several NICs: there the source address alone does not choose one."""
        self._checked = is_on(checksum)
        self.service = TcpService(memory, limits, meter, clock)

    def connect(self, remote: SegmentDescriptor, path: Path, deadline: float, replaces: int) -> Connection:
        there = remote.nic(path.remote_nic)
        here = self._nics.get(path.local_nic) if path.local_nic else None
        link = dial(
            (there.address, there.port),
            remote.boot_id,
            Service.TCP,
            self._identity,
            self._limits,
            deadline,
            source=here.address if here is not None else "",
            interface=here.name if here is not None and here.network in self._crowded else "",
            replaces=replaces,
            clock=self._clock,
        )
        return Connection(link, self._memory, checked=self._checked)
