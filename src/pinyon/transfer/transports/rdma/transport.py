"""RDMA: one-sided READs and WRITEs between registered regions, NIC to NIC, over reliable connections (Mooncake §3.2.3).

No processor of the peer takes part in moving bytes: it sets a queue pair up and says where regions lie, over a control
link, and the rest is between the NICs. So offsets and access are checked here, from what the peer granted, for the sake
of one behaviour with the other transports; the peer's NIC checks them again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from pinyon.core.clock import Clock
from pinyon.transfer.host.discovery import discover, rdma_nics
from pinyon.transfer.links.dialer import Link, dial
from pinyon.transfer.links.endpoints import Endpoints
from pinyon.transfer.links.handshake import Service
from pinyon.transfer.links.identity import Identity
from pinyon.transfer.links.stream import DeadlineReached, Stalled
from pinyon.transfer.memory.table import MemoryTable
from pinyon.transfer.transports.rdma.endpoint import RdmaEndpoint
from pinyon.transfer.transports.rdma.hcas import HcaTable
from pinyon.transfer.transports.rdma.server import RdmaServer
from pinyon.transfer.transports.rdma.verbs import VerbsError, rdma_available
from pinyon.transfer.types.limits import TransferLimits
from pinyon.transfer.types.nic import Nic, same_network
from pinyon.transfer.types.path import Path
from pinyon.transfer.types.segment import SegmentDescriptor
from pinyon.transfer.types.stats import Meter

__all__ = ["RdmaTransport", "rdma_available"]

_log = logging.getLogger(__name__)
_MAX_ADDRESSES = 3
"""Of the peer that are tried for a control link."""
_CLOSE_S = 10.0


class RdmaTransport(Endpoints[RdmaEndpoint]):
    """Initiator side; ``service`` is the other one."""

    name = "rdma"

    def __init__(
        self,
        memory: MemoryTable,
        limits: TransferLimits,
        identity: Identity,
        meter: Meter,
        nics: Mapping[str, Nic],
        *,
        clock: Clock = time.monotonic,
    ) -> None:
        """``nics``: this host's, by name; none: all that are active. An HCA is opened when it is first needed."""
        super().__init__(limits.queue_pairs_per_path, limits, meter, clock)
        if not nics:
            nics = {nic.name: nic for nic in rdma_nics(discover())}
        self._identity = identity
        self._hcas = HcaTable(nics, clock)
        self.nics = tuple(nic for nic in nics.values() if nic.transport == "rdma")
        """What peers may connect to."""
        self.service = RdmaServer(memory, limits, self._hcas, meter, clock)
        memory.on_unregister.append(self._hcas.forget)

    def connect(self, remote: SegmentDescriptor, path: Path, deadline: float, replaces: int) -> RdmaEndpoint:
        limit = min(deadline, self._clock() + self._limits.connect_s)
        link = self._dial(remote, path, limit, replaces)
        endpoint = None
        try:
            endpoint = RdmaEndpoint(link, self._hcas, path.local_nic, self._limits, self._clock)
            endpoint.pair(path.remote_nic, limit)
        except BaseException as error:
            if endpoint is None:
                link.stream.close(hard=True)
            else:
                endpoint.close(hard=True)
            if isinstance(error, VerbsError):
                _log.info("no RDMA connection: %s", error)
                raise ConnectionError(str(error)) from None
            raise
        return endpoint

    def _dial(self, remote: SegmentDescriptor, path: Path, deadline: float, replaces: int) -> Link:
        """A control link, by any tcp address of the peer: first one beside the RDMA NIC, then the primary one."""
        there = remote.nic(path.remote_nic)
        beside = [nic for nic in remote.nics if nic.transport == "tcp" and same_network(nic, there)]
        addresses = dict.fromkeys(
            (nic.address, nic.port) for nic in [*beside, remote.nic(""), *remote.nics] if nic.transport == "tcp"
        )
        left = list(addresses)[:_MAX_ADDRESSES]
        if not left:
            raise ConnectionError("the peer publishes no tcp address for a control link")
        while True:
            address = left.pop(0)
            now = self._clock()
            limit = now + (deadline - now) / (len(left) + 1)
            try:
                return dial(
                    address,
                    remote.boot_id,
                    Service.RDMA,
                    self._identity,
                    self._limits,
                    limit,
                    replaces=replaces,
                    clock=self._clock,
                )
            except (OSError, Stalled, DeadlineReached):
                if not left:
                    raise

    def maintain(self, now: float) -> None:
        """See ``Transport.maintain``. HCAs that are being removed are let go of, else they cannot be."""
        super().maintain(now)
        self.forget_nics(self._hcas.sweep())

    def close(self) -> None:
        super().close()
        self._hcas.close(_CLOSE_S)
