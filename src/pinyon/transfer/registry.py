"""Which transports there are, and which of them work on this host."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pinyon.core.clock import Clock
from pinyon.transfer.links.handshake import Service
from pinyon.transfer.links.identity import Identity
from pinyon.transfer.links.inbound import LinkService
from pinyon.transfer.memory.table import MemoryTable
from pinyon.transfer.transports.base import Transport
from pinyon.transfer.transports.local import LocalTransport
from pinyon.transfer.transports.nixl.transport import NixlError, NixlTransport, nixl_available
from pinyon.transfer.transports.rdma.transport import RdmaTransport, rdma_available
from pinyon.transfer.transports.shm.transport import ShmTransport, shm_available
from pinyon.transfer.transports.tcp.transport import TcpTransport
from pinyon.transfer.types.errors import InvalidTransfer
from pinyon.transfer.types.limits import TransferLimits
from pinyon.transfer.types.nic import Nic
from pinyon.transfer.types.stats import Meter

__all__ = ["TRANSPORTS", "Built", "build_transports"]

_log = logging.getLogger(__name__)

TRANSPORTS = ("local", "shm", "rdma", "tcp")
"""All that are used unless said otherwise, fastest first. ``nixl`` is asked for by a setting of its own."""
_UNAVAILABLE: dict[str, Callable[[], str | None]] = {"shm": shm_available, "rdma": rdma_available}


class Built(NamedTuple):
    transports: dict[str, Transport]
    order: tuple[str, ...]
    """Those that may be used to reach peers, best first."""
    services: dict[int, LinkService]
    """What peers are served, whatever this side uses itself."""
    nics: tuple[Nic, ...]
    shm: str
    """Unix socket to listen on; empty: none."""
    nixl: bool
    """Peers may come by NIXL."""


def build_transports(
    memory: MemoryTable,
    limits: TransferLimits,
    identity: Identity,
    meter: Meter,
    nics: Sequence[Nic],
    wanted: Sequence[str] | None,
    checksum: str,
    clock: Clock,
    *,
    offer_shm: bool = True,
    nixl: str = "off",
    loopback: bool = False,
) -> Built:
    """
    Args:
        nixl: one of ``roads.MODES``.
        loopback: only processes of this host are to reach this one.

    Raises:
        InvalidTransfer: an unknown transport, none at all, or a wanted one that does not work here (says why; of NIXL
            with the field ``nixl``).
    """
    order = tuple(TRANSPORTS if wanted is None else dict.fromkeys(wanted))
    if not order or not set(order) <= set(TRANSPORTS):
        raise InvalidTransfer(f"transports are {', '.join(TRANSPORTS)}; not {', '.join(order)!r}", field="transports")
    reasons = {name: reason for name, check in _UNAVAILABLE.items() if (reason := check()) is not None}
    if not offer_shm:
        reasons["shm"] = "it is not offered"
    for name in order:
        if name in reasons:
            if wanted is not None:
                raise InvalidTransfer(f"transport {name} does not work here: {reasons[name]}", field="transports")
            _log.debug("transport %s is not used: %s", name, reasons[name])
    order = tuple(name for name in order if name not in reasons)

    transports: dict[str, Transport] = {"local": LocalTransport(memory, clock=clock)}
    services: dict[int, LinkService] = {}
    tcp = TcpTransport(memory, limits, identity, meter, _named(nics, "tcp"), checksum=checksum, clock=clock)
    transports["tcp"], services[Service.TCP] = tcp, tcp.service
    published = [nic for nic in nics if nic.transport == "tcp"]
    shm_address = ""
    if "shm" not in reasons:
        shm = ShmTransport(memory, limits, identity, meter, clock=clock)
        transports["shm"], services[Service.SHM], shm_address = shm, shm.service, shm.address
    if "rdma" not in reasons:
        rdma = RdmaTransport(memory, limits, identity, meter, _named(nics, "rdma"), clock=clock)
        transports["rdma"], services[Service.RDMA] = rdma, rdma.service
        published += rdma.nics
    if nixl != "off":
        by_nixl = _nixl(memory, limits, identity, meter, loopback, clock)
        transports["nixl"], services[Service.NIXL] = by_nixl, by_nixl.service
        order = ("nixl", *order)
    return Built(transports, order, services, tuple(published), shm_address, "nixl" in transports)


def _nixl(
    memory: MemoryTable, limits: TransferLimits, identity: Identity, meter: Meter, loopback: bool, clock: Clock
) -> NixlTransport:
    try:
        if (reason := nixl_available()) is not None:
            raise NixlError(reason)
        return NixlTransport(memory, limits, identity, meter, loopback=loopback, clock=clock)
    except NixlError as error:
        raise InvalidTransfer(f"transport nixl does not work here: {error}", field="nixl") from None


def _named(nics: Sequence[Nic], transport: str) -> dict[str, Nic]:
    named = {nic.name: nic for nic in nics if nic.transport == transport}
    if len(named) != sum(1 for nic in nics if nic.transport == transport):
        raise InvalidTransfer(f"two {transport} NICs have one name", field="nics")
    return named
