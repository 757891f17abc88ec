"""Clients' addresses, and how much one address holds. Forwarded addresses are believed of trusted proxies only.

A peer is an IPv4 address or an IPv6 /64: whoever has one address of a /64 has them all. A proxy names the client in a
header field, or in a header of the PROXY protocol at the beginning of its connection. Versions 1 and 2 are read
(https://www.haproxy.org/download/3.0/doc/proxy-protocol.txt, sections 2.1 and 2.2)."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from pinyon.core.address import network_of
from pinyon.core.errors import InvalidArgument
from pinyon.http.answer import HttpError

FORWARDED_FIELDS = ("x-forwarded-for", "forwarded")
HOPS_MAX = 32
"""The maximum number of forwarded addresses that are examined, counted from the last."""
NETWORKS_MAX = 256

LINE_MAX = 107
"""The maximum bytes of a version 1 header, including CRLF (section 2.1)."""
BLOCK_MAX = 536
"""The maximum bytes of a version 2 header, and of either version, which senders may rely on (section 2.2); bytes after
the addresses are skipped."""
SIGNATURE = b"\r\n\r\n\0\r\nQUIT\n"


Address = IPv4Address | IPv6Address
ProxyLine = tuple[str, int]
"""The client's address (empty if the proxy speaks for itself) and the number of bytes read."""


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
    ``Forwarded``."""

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


def read_proxy_line(data: bytes) -> ProxyLine | None:
    """Reads a PROXY header; returns None if it is incomplete. Raises :class:`HttpError` if it is not a header."""
    if data[: len(SIGNATURE)] == SIGNATURE[: len(data)]:
        return _version_2(data)
    if data[:6] != b"PROXY "[: len(data)]:
        raise _missing()
    end = data.find(b"\r\n", 0, LINE_MAX)
    if end < 0:
        if len(data) >= LINE_MAX:
            raise _missing()
        return None
    words = data[:end].decode("latin-1").split(" ")
    if words[1] == "UNKNOWN":
        return "", end + 2
    address = parse_address(words[2]) if len(words) == 6 and words[1] in ("TCP4", "TCP6") else None
    if address is None:
        raise _missing()
    return str(address), end + 2


def _version_2(data: bytes) -> ProxyLine | None:
    if len(data) < 16:
        return None
    command, family = data[12], data[13]
    size = 16 + int.from_bytes(data[14:16])
    if command >> 4 != 2 or command & 15 > 1 or size > BLOCK_MAX:
        raise _missing()
    if len(data) < size:
        return None
    if command & 15 == 0:  # LOCAL
        return "", size
    if family >> 4 == 1 and size >= 16 + 12:
        return str(IPv4Address(data[16:20])), size
    if family >> 4 == 2 and size >= 16 + 36:
        address = IPv6Address(data[16:32])
        return str(address.ipv4_mapped or address), size
    return "", size


def _missing() -> HttpError:
    return HttpError(400, "The connection must begin with a PROXY protocol header.")
