"""Network addresses in the forms that people and messages use."""

from __future__ import annotations

from ipaddress import IPv6Address, IPv6Network, ip_address

from pinyon.core.errors import InvalidArgument


def is_loopback(host: str) -> bool:
    """Returns whether only this machine reaches a listener at ``host``. The only name that counts is localhost."""
    try:
        parsed = ip_address(host)
    except ValueError:
        return host == "localhost"
    mapped = parsed.ipv4_mapped if isinstance(parsed, IPv6Address) else None
    # A listener at [::] sees IPv4 addresses mapped; before Python 3.13 a mapped one is not itself a loopback.
    return (mapped or parsed).is_loopback


def network_of(host: str) -> str:
    """Returns the address, or its IPv6 /64, which counts as one peer since whoever has one address of it has all."""
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
    """Returns ``host:port`` as ``(host, port)``; an IPv6 host is in brackets. Raises :class:`InvalidArgument`."""
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isdecimal() or int(port) > 65535:
        raise InvalidArgument(f"{address!r} is not host:port", field="address")
    return host.strip("[]"), int(port)


def shifted(address: str, by: int) -> str:
    """Returns the address for one of several processes of an engine, which cannot share a port."""
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + by}" if int(port or 0) else address
