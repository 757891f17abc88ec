"""What a host has that matters to transfers: NUMA nodes, GPUs, NICs, and how far these are from each other. Pure.

Read from the machine by ``pinyon.transfer.host.discovery``; made into a matrix by ``pinyon.transfer.types.topology``.
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
    """``"RoCE v2"``, ``"IB/RoCE v1"`` (also every GID of InfiniBand), as the kernel writes it."""
    text: str
    """Eight groups of four hexadecimal digits."""
    netdev: str = ""
    """The interface whose address it is."""


@dataclass(frozen=True, slots=True)
class NicInfo:
    """One NIC of this host as found; None is "not known"."""

    name: str
    kind: str
    """``"tcp"``: a network interface; ``"rdma"``: an RDMA device."""
    pci: tuple[str, ...] = ()
    """From the host bridge down: ``("pci0000:00", "0000:00:01.0", "0000:01:00.0")``; empty when it is not on PCI."""
    numa: int | None = None
    speed_mbit: int | None = None
    up: bool = True
    mtu: int | None = None
    """Bytes; of an RDMA device: of its interface."""
    addresses: tuple[str, ...] | None = None
    """Those that peers can use (no link-local IPv6), ``"10.0.1.5/24"``; of an RDMA device: of its interface."""
    gids: tuple[Gid, ...] = ()
    netdev: str = ""
    """An RDMA device's network interface."""
    port: int = 1
    """An RDMA device's port number."""
    virtual: bool = False
    """No hardware below it: veth, container bridge, tunnel."""
    loopback: bool = False
    enslaved: bool = False
    """Part of a bond or bridge, which normally has the addresses."""


@dataclass(frozen=True, slots=True)
class GpuInfo:
    index: int
    """The N of ``cuda:N``: in PCI order, as CUDA counts GPUs of one kind."""
    pci: tuple[str, ...]
    numa: int | None = None


class NumaNode(NamedTuple):
    id: int
    cpus: tuple[int, ...]
    """Empty for a node of memory alone."""


@dataclass(frozen=True, slots=True)
class Inventory:
    """What one host has. NICs and GPUs are in the order in which they are preferred when all else is equal."""

    nodes: tuple[NumaNode, ...] = ()
    nics: tuple[NicInfo, ...] = ()
    gpus: tuple[GpuInfo, ...] = ()


class Distance(IntEnum):
    """How far two devices are from each other, by what is on the way (the classes of ``nvidia-smi topo``)."""

    SWITCH = 0
    """Under one root port: only PCIe switches between them (PIX, PXB)."""
    HOST_BRIDGE = 1
    """Through the host bridge (PHB)."""
    NODE = 2
    """Between host bridges of one NUMA node, or of nodes that are not known."""
    SYSTEM = 3
    """Through the link between sockets."""


def pci_distance(gpu: GpuInfo, nic: NicInfo) -> tuple[Distance, int]:
    """Class and PCIe hops; smaller is nearer. Hops count only below one root port: above, they say nothing of speed."""
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
    """The NICs of a kind that may carry transfers, in the inventory's order.

    With ``names``: exactly those of the named ones that exist. Without, for tcp: interfaces with an address, no
    loopback, virtual ones only where there is no other (as in a container). Where addresses are not known, all count
    but the parts of a bond or bridge.
    """
    nics = [nic for nic in inventory.nics if nic.kind == kind]
    if names:
        return tuple(nic for nic in nics if nic.name in names)
    if kind != "tcp":
        return tuple(nics)
    nics = [nic for nic in nics if not nic.loopback and nic.addresses != ()]
    nics = [nic for nic in nics if nic.addresses or not nic.enslaved]
    return tuple([nic for nic in nics if not nic.virtual] or nics)


def choose_gid(gids: Iterable[Gid]) -> Gid | None:
    """The GID to publish and connect from; None when the table is empty.

    RoCE v2 with an IPv4 address first (routable, and what networks are configured for), then v2 with a global IPv6
    address, then v2 link-local, then v1, which no router forwards; the lowest index among equals.
    """
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
