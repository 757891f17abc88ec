"""Network addresses as people and messages write them."""

from __future__ import annotations

from ipaddress import ip_address

from pinyon.core.errors import InvalidArgument

__all__ = ["is_loopback", "parse_address"]


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens there. Of names, only localhost is known to be."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def parse_address(address: str) -> tuple[str, int]:
    """``host:port`` as ``(host, port)``; an IPv6 host stands in brackets. Raises :class:`InvalidArgument`."""
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isdecimal() or int(port) > 65535:
        raise InvalidArgument(f"{address!r} is not host:port", field="address")
    return host.strip("[]"), int(port)
