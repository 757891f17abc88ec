"""The hardware of a host that matters to transfers: NUMA nodes, GPUs, NICs, and the distances between them. Pure.

``pinyon.transfer.host.discovery`` reads it from the machine, ``pinyon.transfer.types.topology`` makes a matrix of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import IntEnum
from ipaddress import IPv6Address
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Gid:
    """One entry of an RDMA port's GID table."""

    index: int
    kind: str
    """The type as the kernel writes it: ``"RoCE v2"`` or ``"IB/RoCE v1"`` (also every GID of InfiniBand)."""
    text: str
    """The GID as eight groups of four hexadecimal digits."""
    netdev: str = ""
    """The network interface that has this address."""


@dataclass(frozen=True, slots=True)
class NicInfo:
    """One NIC of this host as found; None means "not known"."""

    name: str
    kind: str
    """Either ``"tcp"``, a network interface, or ``"rdma"``, an RDMA device."""
    pci: tuple[str, ...] = ()
    """PCI path from the host bridge down, ``("pci0000:00", "0000:00:01.0", "0000:01:00.0")``; empty if not on PCI."""
    numa: int | None = None
    speed_mbit: int | None = None
    up: bool = True
    addresses: tuple[str, ...] | None = None
    """Addresses like ``"10.0.1.5/24"`` that peers can use (no link-local IPv6); an RDMA device has its interface's."""
    gids: tuple[Gid, ...] = ()
    port: int = 1
    """An RDMA device's port number."""
    virtual: bool = False
    """True if no hardware is below it: veth, container bridge, tunnel."""
    loopback: bool = False
    enslaved: bool = False
    """True if it is part of a bond or bridge, which normally has the addresses."""


@dataclass(frozen=True, slots=True)
class GpuInfo:
    index: int
    """The N of ``cuda:N``: in PCI order, as CUDA numbers GPUs of one kind."""
    pci: tuple[str, ...]
    numa: int | None = None


class NumaNode(NamedTuple):
    id: int
    cpus: tuple[int, ...]
    """CPU numbers; empty for a node that has only memory."""


@dataclass(frozen=True, slots=True)
class Inventory:
    """The devices of one host. NICs and GPUs are in order of preference when all else is equal."""

    nodes: tuple[NumaNode, ...] = ()
    nics: tuple[NicInfo, ...] = ()
    gpus: tuple[GpuInfo, ...] = ()


class Distance(IntEnum):
    """The distance of two devices, by what lies between them (the classes of ``nvidia-smi topo``)."""

    SWITCH = 0
    """Devices under one root port, with only PCIe switches between them (PIX, PXB)."""
    HOST_BRIDGE = 1
    """Devices connected through one host bridge (PHB)."""
    NODE = 2
    """Devices on different host bridges of one NUMA node, or of nodes that are not known."""
    SYSTEM = 3
    """Devices connected through the link between sockets."""


def pci_distance(gpu: GpuInfo, nic: NicInfo) -> tuple[Distance, int]:
    """Returns the distance class and the PCIe hops; smaller is nearer.

    Hops count only below one root port: above it they say nothing about speed."""
    common = 0
    for ours, theirs in zip(gpu.pci, nic.pci, strict=False):
        if ours != theirs:
            break
        common += 1
    if common >= 2:
        return Distance.SWITCH, len(gpu.pci) + len(nic.pci) - 2 * common
    if common == 1:
        return Distance.HOST_BRIDGE, 0
    if gpu.numa is None or nic.numa is None or gpu.numa == nic.numa:
        return Distance.NODE, 0
    return Distance.SYSTEM, 0


def usable_nics(inventory: Inventory, kind: str, names: Collection[str] = ()) -> tuple[NicInfo, ...]:
    """Returns the NICs of a kind that may carry transfers, in the inventory's order.

    With ``names`` these are exactly the named NICs that exist. Without, tcp uses interfaces with an address and no
    loopback, and virtual ones only where there is no other (as in a container). Where addresses are not known, all
    count except the parts of a bond or bridge."""
    nics = [nic for nic in inventory.nics if nic.kind == kind]
    if names:
        return tuple(nic for nic in nics if nic.name in names)
    if kind != "tcp":
        return tuple(nics)
    nics = [nic for nic in nics if not nic.loopback and nic.addresses != ()]
    nics = [nic for nic in nics if nic.addresses or not nic.enslaved]
    return tuple([nic for nic in nics if not nic.virtual] or nics)


def choose_gid(gids: Iterable[Gid]) -> Gid | None:
    """Returns the GID to publish and to connect from, or None if the table has none.

    RoCE v2 with an IPv4 address comes first: it is routable, and what networks are configured for. Then come v2 with a
    global IPv6 address, v2 link-local, and v1, which no router forwards. The lowest index wins among equals."""
    return min((gid for gid in gids if int(_gid_address(gid))), key=_gid_order, default=None)


def _gid_address(gid: Gid) -> IPv6Address:
    try:
        return IPv6Address(gid.text)
    except ValueError:
        return IPv6Address(0)


def _gid_order(gid: Gid) -> tuple[int, int]:
    address = _gid_address(gid)
    if gid.kind != "RoCE v2":
        return 3, gid.index
    if address.ipv4_mapped is not None:
        return 0, gid.index
    return (2 if address.is_link_local else 1), gid.index
