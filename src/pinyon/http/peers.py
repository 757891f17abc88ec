"""Clients' addresses, and how much one address holds. Forwarded addresses are believed of trusted proxies only.

A peer is an IPv4 address or an IPv6 /64: whoever has one address of a /64 has them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from pinyon.core.address import network_of
from pinyon.core.errors import InvalidArgument

FORWARDED_FIELDS = ("x-forwarded-for", "forwarded")
HOPS_MAX = 32
"""The maximum number of forwarded addresses that are examined, counted from the last."""
NETWORKS_MAX = 256

Address = IPv4Address | IPv6Address


def parse_address(text: str) -> Address | None:
    try:
        address = ip_address(text)
    except ValueError:
        return None
    if isinstance(address, IPv6Address):
        return address.ipv4_mapped or address
    return address


class TrustedProxies:
    """The proxies whose forwarded addresses are believed.

    ``networks`` is a list like ``10.0.0.0/8, 2001:db8::/32``; ``field`` is the only header field that the proxies
    write. A second one would be unsafe: a proxy that writes ``X-Forwarded-For`` passes on what a client wrote into
    ``Forwarded``.
    """

    def __init__(self, networks: str = "", field: str = FORWARDED_FIELDS[0]) -> None:
        self._networks: list[IPv4Network | IPv6Network] = []
        self._field = field.encode("ascii")
        names = [name.strip() for name in networks.split(",") if name.strip()]
        if len(names) > NETWORKS_MAX:
            raise InvalidArgument(f"at most {NETWORKS_MAX} networks", field="trusted_proxies")
        for name in names:
            try:
                self._networks.append(ip_network(name))
            except ValueError as error:
                raise InvalidArgument(f"no network: {error}", field="trusted_proxies") from None

    def trusts(self, address: str) -> bool:
        if not self._networks:
            return False
        parsed = parse_address(address)
        return parsed is not None and self._in_networks(parsed)

    def _in_networks(self, address: Address) -> bool:
        return any(address in network for network in self._networks)

    def client(self, proxy: str, fields: Sequence[tuple[bytes, bytes]]) -> str:
        """Returns the last forwarded hop that is not itself a trusted proxy, or else ``proxy``, which is trusted."""
        hops = [hop for name, value in fields if name == self._field for hop in value.split(b",")]
        found = proxy
        for hop in reversed(hops[-HOPS_MAX:]):
            address = parse_address(_hop_address(hop.decode("latin-1"), self._field))
            if address is None:  # "unknown", obfuscated or malformed: no hop before it can be believed
                break
            found = str(address)
            if not self._in_networks(address):
                break
        return found


def _hop_address(hop: str, field: bytes) -> str:
    """Returns the address in one element of the field, without its port."""
    text = hop.strip()
    if field == b"forwarded":
        pairs = [pair.partition("=") for pair in text.split(";")]
        values = [value.strip() for name, _, value in pairs if name.strip().lower() == "for"]
        text = values[0].strip('"') if len(values) == 1 else ""
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0] if text.count(":") == 1 else text


class PeerPlaces:
    """The number of places that each peer holds; peers that hold none are forgotten."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._counts: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._counts)

    def take(self, address: str) -> str | None:
        """Takes a place for an address; returns the peer to pass to :meth:`give`, or None if the limit is reached."""
        peer = network_of(address)
        count = self._counts.get(peer, 0)
        if count >= self._limit:
            return None
        self._counts[peer] = count + 1
        return peer

    def give(self, peer: str) -> None:
        count = self._counts[peer] - 1
        if count:
            self._counts[peer] = count
        else:
            del self._counts[peer]
