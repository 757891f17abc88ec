"""Network addresses as people and messages write them."""

from __future__ import annotations

from ipaddress import IPv6Address, IPv6Network, ip_address

from pinyon.core.errors import InvalidArgument


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens there. Of names, only localhost is known to be."""
    try:
        parsed = ip_address(host)
    except ValueError:
        return host == "localhost"
    mapped = parsed.ipv4_mapped if isinstance(parsed, IPv6Address) else None
    # Who listens at [::] sees IPv4 so; before Python 3.13 that is no loopback by itself.
    return (mapped or parsed).is_loopback


def network_of(host: str) -> str:
    """What counts as one peer: the address, or the IPv6 /64 that it is in, since who has one address of it has all."""
    if ":" not in host:
        return host
    try:
        parsed = ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if not isinstance(parsed, IPv6Address):
        return str(parsed)
    mapped = parsed.ipv4_mapped
    return str(mapped) if mapped is not None else str(IPv6Network((int(parsed) >> 64 << 64, 64)))


def parse_address(address: str) -> tuple[str, int]:
    """``host:port`` as ``(host, port)``; an IPv6 host stands in brackets. Raises :class:`InvalidArgument`."""
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isdecimal() or int(port) > 65535:
        raise InvalidArgument(f"{address!r} is not host:port", field="address")
    return host.strip("[]"), int(port)
