"""The network interfaces that a peer publishes, and the paths that bytes take between two hosts. Pure values."""

from __future__ import annotations

from functools import lru_cache
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any, NamedTuple

from pinyon.transfer.types.errors import InvalidTransfer

MAX_NIC_CHARS = 64
"""The longest name of a NIC; the kernel's own bounds are 15 (interfaces) and 63 (RDMA devices)."""
MAX_ADDRESS_CHARS = 64
MAX_NETWORK_CHARS = 64
MAX_HCA_PORT = 254
"""Port numbers of an RDMA device are 8 bits wide; 0 and 255 are reserved (InfiniBand specification, PortInfo)."""


class Nic(NamedTuple):
    """One network interface of a host. :func:`check_nic` checks it where it comes from outside; making one does not."""

    name: str
    """The host's own name for the NIC, ``"eth0"`` or ``"mlx5_1"``: a key into its topology matrix."""
    transport: str
    """``"tcp"`` or ``"rdma"``."""
    address: str
    """The IP address (tcp), or the GID as text, ``"0000:…:ffff:0a00:0105"`` (rdma)."""
    port: int
    """The port on which the host listens (tcp), or the device's port number, from 1 (rdma)."""
    network: str = ""
    """The IP network of the address, ``"10.0.1.0/24"``; empty when it is not known."""


def check_name(value: Any, field: str = "nic") -> str:
    """Returns ``value`` if it can be a NIC's name, else raises InvalidTransfer.

    A name has 1 to 64 printable characters, no space and no slash, because it becomes a path in sysfs."""
    if not isinstance(value, str) or not 0 < len(value) <= MAX_NIC_CHARS:
        raise InvalidTransfer(f"{field}: a NIC's name has 1 to {MAX_NIC_CHARS} characters", field=field)
    if not value.isprintable() or " " in value or "/" in value or value in (".", ".."):
        raise InvalidTransfer(f"{field}: {value!r} cannot be a NIC's name", field=field)
    return value


def check_nic(value: Nic) -> Nic:
    """Returns the NIC if all its fields are valid, else raises InvalidTransfer with the first field that is not."""
    check_name(value.name, "nic.name")
    if value.transport not in ("tcp", "rdma"):
        raise InvalidTransfer(f"{value.name}: a NIC's transport is tcp or rdma", field="nic.transport")
    top = 65535 if value.transport == "tcp" else MAX_HCA_PORT
    if not isinstance(value.port, int) or isinstance(value.port, bool) or not 0 < value.port <= top:
        raise InvalidTransfer(f"{value.name}: its port is 1 to {top}", field="nic.port")
    _check_address(value)
    if not isinstance(value.network, str) or len(value.network) > MAX_NETWORK_CHARS:
        raise InvalidTransfer(f"{value.name}: not a network", field="nic.network")
    if value.network and _network(value.network) is None:
        raise InvalidTransfer(f"{value.name}: {value.network!r} is not a network like 10.0.1.0/24", field="nic.network")
    return value


def _check_address(value: Nic) -> None:
    if not isinstance(value.address, str) or not 0 < len(value.address) <= MAX_ADDRESS_CHARS:
        raise InvalidTransfer(f"{value.name}: an address has 1 to {MAX_ADDRESS_CHARS} characters", field="nic.address")
    try:
        address = ip_address(value.address)
    except ValueError:
        raise InvalidTransfer(f"{value.name}: {value.address!r} is not an address", field="nic.address") from None
    if isinstance(address, IPv6Address) and address.scope_id is not None:
        # A scope is an interface of the publisher: to the reader it means nothing, or something else.
        raise InvalidTransfer(f"{value.name}: an address with a scope is of no use to peers", field="nic.address")
    if value.transport == "rdma" and address.version != 6:
        raise InvalidTransfer(f"{value.name}: a GID is written like an IPv6 address", field="nic.address")


def same_network(a: Nic, b: Nic) -> bool | None:
    """Returns whether two NICs are on one IP network, with no router between them; None if a network is not known.

    False does not mean unreachable: there may be a route."""
    if not a.network or not b.network:
        return None
    if a.network == b.network:
        return True
    one, other = _network(a.network), _network(b.network)
    if one is None or other is None:
        return None
    return one.overlaps(other)


@lru_cache(maxsize=1024)
def _network(text: str) -> IPv4Network | IPv6Network | None:
    try:
        return ip_network(text)
    except ValueError:
        return None


class Path(NamedTuple):
    """A transport with a NIC at each end; NIC names are empty for ``local``, ``shm`` and unknown NICs."""

    transport: str
    """``"local"``, ``"shm"``, ``"rdma"`` or ``"tcp"``."""
    local_nic: str
    remote_nic: str


Tiers = tuple[tuple[Path, ...], ...]
"""Tiers of paths, best first: none empty, each of one transport, a transport's tiers in a row, no path twice."""
