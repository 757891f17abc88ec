"""The registry of transports: which exist, and which of them work on this host."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pinyon.transfer.links.acceptor import LinkService
from pinyon.transfer.links.context import EngineContext
from pinyon.transfer.links.handshake import Service
from pinyon.transfer.transports.base import Transport
from pinyon.transfer.transports.local import LocalTransport
from pinyon.transfer.transports.rdma.transport import RdmaTransport
from pinyon.transfer.transports.rdma.verbs import rdma_available
from pinyon.transfer.transports.shm.cma import shm_available
from pinyon.transfer.transports.shm.transport import ShmTransport
from pinyon.transfer.transports.tcp.transport import TcpTransport
from pinyon.transfer.types.errors import InvalidTransfer
from pinyon.transfer.types.nic import Nic
from pinyon.transfer.types.options import TRANSPORTS, Transports

_log = logging.getLogger(__name__)

_UNAVAILABLE: dict[str, Callable[[], str | None]] = {"shm": shm_available, "rdma": rdma_available}


class Built(NamedTuple):
    transports: dict[str, Transport]
    order: tuple[str, ...]
    """Transports that may be used to reach peers, best first."""
    services: dict[int, LinkService]
    """Services offered to peers, whatever this side uses itself."""
    nics: tuple[Nic, ...]
    shm: str
    """The Unix socket to listen on; empty if there is none."""


def build_transports(context: EngineContext, wanted: Transports, nics: Sequence[Nic]) -> Built:
    """Builds the transports. Raises InvalidTransfer that says why a wanted transport does not work here."""
    order = tuple(dict.fromkeys(TRANSPORTS if wanted.names is None else wanted.names))
    reasons = {name: reason for name, check in _UNAVAILABLE.items() if (reason := check()) is not None}
    if not wanted.offer_shm:
        reasons["shm"] = "it is not offered"
    for name in order:
        if name in reasons:
            if wanted.names is not None:
                raise InvalidTransfer(f"transport {name} does not work here: {reasons[name]}", field="transports")
            _log.debug("transport %s is not used: %s", name, reasons[name])
    order = tuple(name for name in order if name not in reasons)

    transports: dict[str, Transport] = {"local": LocalTransport(context)}
    services: dict[int, LinkService] = {}
    tcp = TcpTransport(context, _named(nics, "tcp"), checked=wanted.checksum == "on")
    transports["tcp"], services[Service.TCP] = tcp, tcp.service
    published = [nic for nic in nics if nic.transport == "tcp"]
    shm_address = ""
    if "shm" not in reasons:
        shm = ShmTransport(context)
        transports["shm"], services[Service.SHM], shm_address = shm, shm.service, shm.address
    if "rdma" not in reasons:
        rdma = RdmaTransport(context, _named(nics, "rdma"))
        transports["rdma"], services[Service.RDMA] = rdma, rdma.service
        published += rdma.nics
    return Built(transports, order, services, tuple(published), shm_address)


def _named(nics: Sequence[Nic], transport: str) -> dict[str, Nic]:
    named = {nic.name: nic for nic in nics if nic.transport == transport}
    if len(named) != sum(1 for nic in nics if nic.transport == transport):
        raise InvalidTransfer(f"two {transport} NICs have one name", field="nics")
    return named
