"""The tcp transport: threads with blocking sockets, payload straight between sockets and registered memory.

It uses threads, not asyncio, because the process's event loop and its engine thread share the GIL. Here a megabyte
costs a few system calls, during which the GIL is free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from pinyon.transfer.links.context import EngineContext
from pinyon.transfer.links.dialer import dial
from pinyon.transfer.links.endpoints import Endpoints
from pinyon.transfer.links.handshake import Service
from pinyon.transfer.transports.tcp.client import Connection
from pinyon.transfer.transports.tcp.server import TcpService
from pinyon.transfer.types.nic import Nic
from pinyon.transfer.types.path import Path
from pinyon.transfer.types.segment import SegmentDescriptor


class TcpTransport(Endpoints[Connection]):
    """The initiator's side of tcp; ``service`` is the serving side."""

    name = "tcp"

    def __init__(self, context: EngineContext, nics: Mapping[str, Nic], *, checked: bool = True) -> None:
        """Takes this host's ``nics`` by name; with ``checked``, payloads carry a checksum."""
        super().__init__(context, context.limits.connections_per_peer)
        self.moves_bytes = context.limits.max_frame_bytes
        self._nics = nics
        networks = Counter(nic.network for nic in nics.values() if nic.transport == "tcp")
        self._crowded = {network for network, count in networks.items() if count > 1}
        """The networks on which we have several NICs, so that the source address alone does not choose one."""
        self._checked = checked
        self.service = TcpService(context)

    def connect(self, remote: SegmentDescriptor, path: Path, deadline: float, replaces: int) -> Connection:
        there = remote.nic(path.remote_nic)
        here = self._nics.get(path.local_nic) if path.local_nic else None
        link = dial(
            self._context,
            (there.address, there.port),
            remote.boot_id,
            Service.TCP,
            deadline,
            source=here.address if here is not None else "",
            interface=here.name if here is not None and here.network in self._crowded else "",
            replaces=replaces,
        )
        return Connection(link, self._context.memory, checked=self._checked)
