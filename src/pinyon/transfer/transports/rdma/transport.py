"""RDMA: one-sided READs and WRITEs between registered regions, NIC to NIC, over reliable connections (Mooncake §3.2.3).

No processor of the peer takes part in moving bytes. Over a control link the peer sets up a queue pair and says where
regions lie; the NICs do the rest. Offsets and access are checked here, against what the peer granted, so that all
transports behave alike; the peer's NIC checks them again."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from pinyon.transfer.host.discovery import discover, rdma_nics
from pinyon.transfer.links.context import EngineContext
from pinyon.transfer.links.dialer import Link, dial
from pinyon.transfer.links.endpoints import Endpoints
from pinyon.transfer.links.handshake import Service
from pinyon.transfer.links.stream import DeadlineReached, Stalled
from pinyon.transfer.transports.rdma.endpoint import RdmaEndpoint
from pinyon.transfer.transports.rdma.hcas import HcaTable
from pinyon.transfer.transports.rdma.server import RdmaServer
from pinyon.transfer.transports.rdma.verbs import VerbsError
from pinyon.transfer.types.nic import Nic, Path, same_network
from pinyon.transfer.types.segment import SegmentDescriptor

_log = logging.getLogger(__name__)
_MAX_ADDRESSES = 3
"""The peer's addresses that are tried at most for a control link."""
_CLOSE_S = 10.0


class RdmaTransport(Endpoints[RdmaEndpoint]):
    """The initiator's side of rdma; ``service`` is the serving side."""

    def __init__(self, context: EngineContext, nics: Mapping[str, Nic]) -> None:
        """Takes this host's ``nics`` by name (none: all that are active). An HCA is opened when it is first needed."""
        super().__init__(context, context.limits.queue_pairs_per_path)
        if not nics:
            nics = {nic.name: nic for nic in rdma_nics(discover())}
        self._hcas = HcaTable(nics, context.clock)
        self.nics = tuple(nic for nic in nics.values() if nic.transport == "rdma")
        """The NICs to which peers may connect."""
        self.service = RdmaServer(context, self._hcas)
        context.memory.on_unregister.append(self._hcas.forget)

    def connect(self, remote: SegmentDescriptor, path: Path, deadline: float, replaces: int) -> RdmaEndpoint:
        limit = min(deadline, self._clock() + self._limits.connect_s)
        link = self._dial(remote, path, limit, replaces)
        endpoint = None
        try:
            endpoint = RdmaEndpoint(self._context, link, self._hcas, path.local_nic)
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
        """Dials a control link by a tcp address of the peer: beside the RDMA NIC, else the primary, else another."""
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
                return dial(self._context, address, remote.boot_id, Service.RDMA, limit, replaces=replaces)
            except (OSError, Stalled, DeadlineReached):
                if not left:
                    raise

    def maintain(self, now: float) -> None:
        """Does what ``Transport.maintain`` says, and lets go of HCAs being removed, else they cannot be."""
        super().maintain(now)
        gone = self._hcas.sweep()
        self.forget_if(lambda key: key[1].local_nic in gone)

    def close(self) -> None:
        super().close()
        self._hcas.close(_CLOSE_S)
