"""The header fields that go on to a server, and those that come back from it (RFC 9110 §7.6.1)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Fields = Sequence[tuple[bytes, bytes]]

_HOP = frozenset(
    (b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te",
     b"trailer", b"transfer-encoding", b"upgrade")
)  # fmt: skip
_NOT_TO_SERVER = _HOP | {
    b"host", b"content-length", b"content-encoding", b"expect",
    b"authorization", b"x-api-key", b"api-key", b"x-goog-api-key",  # they are for us; the server has a key of its own
    b"accept-encoding",  # the answer is passed on unchanged, and an error may have to be added to it
    b"x-request-id", b"traceparent",
    b"forwarded", b"x-real-ip", b"x-client-ip", b"x-cluster-client-ip", b"true-client-ip", b"cf-connecting-ip",
    b"fastly-client-ip",
}  # fmt: skip
_UNCHECKED = (
    b"x-forwarded-", b"x-original-", b"x-auth-request-", b"x-remote-", b"remote-", b"x-ssl-client-", b"ssl-client-",
    b"x-amzn-oidc-", b"x-goog-authenticated-user-", b"x-ms-client-",
)  # fmt: skip
"""The prefixes of fields about the client's identity: servers trust a proxy with them, but nobody has checked them."""
_NOT_FROM_SERVER = _HOP | {b"content-length", b"content-type", b"date", b"server", b"x-request-id"}
_CORS = b"access-control-"
_RATES = b"x-ratelimit-"


def to_server(fields: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
    """Returns the lines of a client's fields (names in lower case) that the server gets."""
    kept: list[tuple[bytes, bytes]] = []
    listed: set[bytes] = set()
    for name, value in fields:
        plain = name.replace(b"_", b"-")  # many servers do not distinguish these
        if plain == b"connection":
            listed |= _options(value)
        elif plain not in _NOT_TO_SERVER and not plain.startswith(_UNCHECKED):
            kept.append((name, value))
    return [b"%b: %b\r\n" % field for field in kept if field[0] not in listed]


def from_server(fields: Fields, *, own_rates: bool) -> tuple[bytes, bytes]:
    """Returns the content type, and the lines of a server's fields that the client gets. ``own_rates``: the client is
    told our limits instead of the server's."""
    kind = b""
    kept: list[tuple[bytes, bytes]] = []
    listed: set[bytes] = set()
    for name, value in fields:
        if name == b"content-type":
            kind = value
        elif name == b"connection":
            listed |= _options(value)
        elif name not in _NOT_FROM_SERVER and not name.startswith((_CORS, _RATES) if own_rates else _CORS):
            kept.append((name, value))
    return kind, b"".join([b"%b: %b\r\n" % field for field in kept if field[0] not in listed])


def _options(value: bytes) -> set[bytes]:
    """Returns the options of a Connection field, among them the names of fields for this hop only."""
    return {option.strip() for option in value.lower().split(b",")}
