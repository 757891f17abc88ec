"""The PROXY protocol, versions 1 and 2: the address of the client behind the proxy that opened this connection.

https://www.haproxy.org/download/3.0/doc/proxy-protocol.txt, sections 2.1 and 2.2.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address

from pinyon.http.answer import HttpError
from pinyon.http.peers import parse_address

LINE_MAX = 107
"""The maximum bytes of a version 1 header, including CRLF (section 2.1)."""
BLOCK_MAX = 536
"""The maximum of version 2, and of both, which senders may rely on (section 2.2); bytes behind the addresses are
skipped."""
SIGNATURE = b"\r\n\r\n\0\r\nQUIT\n"

ProxyLine = tuple[str, int]
"""The client's address (empty if the proxy speaks for itself) and the number of bytes read."""


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
