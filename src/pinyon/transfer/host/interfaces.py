"""The network interfaces of this network namespace: their addresses and links (``man 7 rtnetlink netdevice``).

Sysfs has no addresses, and in a namespace it may still show the interfaces of another namespace."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from ipaddress import ip_address

_WAIT_S = 2.0
"""Bound on a wait that should not happen, because the kernel answers at once."""
_RECEIVE_BYTES = 1 << 16
"""Size of the buffer: more than the largest part of a dump that a kernel sends in one message (32 KiB)."""

_DONE, _ERROR, _NEWADDR, _GETADDR = 3, 2, 20, 22
_REQUEST_DUMP = 0x1 | 0x300
_IFF_UP_RUNNING = 0x1 | 0x40
_SIOCGIFFLAGS = 0x8913
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_IFA_DUPLICATE_OR_TENTATIVE = 0x08 | 0x40


@dataclass(frozen=True, slots=True)
class Interface:
    index: int
    up: bool
    """True if switched on and with a carrier."""
    addresses: tuple[str, ...]
    """Addresses with prefix, IPv4 first; no link-local IPv6, which means nothing without an interface of the reader."""


def live_interfaces() -> dict[str, Interface]:
    """Returns the interfaces by name. Raises OSError if netlink cannot be had (some sandboxes)."""
    addresses = sorted(_addresses(), key=lambda address: ":" in address[1])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        return {
            name: Interface(index, _is_up(sock, name), tuple(text for owner, text in addresses if owner == index))
            for index, name in socket.if_nameindex()
        }


def _is_up(sock: socket.socket, name: str) -> bool:
    """Returns whether the interface is switched on and has a carrier; one that is gone is down."""
    try:
        answer = fcntl.ioctl(sock, _SIOCGIFFLAGS, struct.pack("16sH14x", name.encode()[:15], 0))
    except OSError:
        return False
    flags: int = struct.unpack_from("H", answer, 16)[0]
    return flags & _IFF_UP_RUNNING == _IFF_UP_RUNNING


def _addresses() -> Iterator[tuple[int, str]]:
    """Yields each address with the index of its interface."""
    for body in _dump():
        _family, prefix, flags, _scope, index = struct.unpack_from("=BBBBi", body)
        attributes = _attributes(body, 8)
        # on a point-to-point link IFA_ADDRESS is the other end's
        packed = attributes.get(_IFA_LOCAL) or attributes.get(_IFA_ADDRESS)
        if packed is None or flags & _IFA_DUPLICATE_OR_TENTATIVE:
            continue
        address = ip_address(packed)
        if address.version == 4 or not address.is_link_local:
            yield index, f"{address}/{prefix}"


def _dump() -> Iterator[bytes]:
    """Yields the bodies of the kernel's answers to a request for all addresses."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as route:
        route.settimeout(_WAIT_S)
        # struct nlmsghdr, then struct ifaddrmsg with room for the longer headers of other families
        route.send(struct.pack("=IHHII", 32, _GETADDR, _REQUEST_DUMP, 1, 0) + bytes(16))
        while True:
            data = route.recv(_RECEIVE_BYTES)
            at = 0
            while at + 16 <= len(data):
                length, kind = struct.unpack_from("=IH", data, at)
                if kind == _DONE or length < 16:
                    return
                if kind == _ERROR:
                    code = -struct.unpack_from("=i", data, at + 16)[0]
                    raise OSError(code, "netlink refused the dump")
                if kind == _NEWADDR:
                    yield data[at + 16 : at + length]
                at += length + 3 & ~3


def _attributes(body: bytes, at: int) -> dict[int, bytes]:
    found = {}
    while at + 4 <= len(body):
        length, kind = struct.unpack_from("=HH", body, at)
        if length < 4:
            break
        found[kind & 0x3FFF] = body[at + 4 : at + length]
        at += length + 3 & ~3
    return found


class LinkMonitor:
    """The links of some interfaces, which all count as up at first. Names that are no interfaces are not watched.

    Only the host's own interfaces can be seen; failures farther away are found by stalls and broken connections."""

    def __init__(self, names: Iterable[str]) -> None:
        self._up: dict[str, bool] = {}
        self._socket: socket.socket | None = None
        for name in names:
            with contextlib.suppress(OSError):  # no such interface here, or a sandbox without such sockets
                socket.if_nametoindex(name)
                self._socket = self._socket or socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
                self._up[name] = True

    def changes(self) -> list[tuple[str, bool]]:
        """Returns the interfaces that went down (False) or came up since the last call."""
        sock = self._socket
        if sock is None:
            return []
        changed = [(name, up) for name, was_up in self._up.items() if (up := _is_up(sock, name)) is not was_up]
        self._up.update(changed)
        return changed

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
