"""Network addresses as people and messages write them."""

from __future__ import annotations

from pinyon.core.errors import InvalidArgument

__all__ = ["parse_address"]


def parse_address(address: str) -> tuple[str, int]:
    """``host:port`` as ``(host, port)``; an IPv6 host stands in brackets. Raises :class:`InvalidArgument`."""
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isdecimal() or int(port) > 65535:
        raise InvalidArgument(f"{address!r} is not host:port", field="address")
    return host.strip("[]"), int(port)
