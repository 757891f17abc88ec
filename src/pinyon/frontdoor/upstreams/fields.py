"""Header fields on their way through: which go on to a server, and which come back from it (RFC 9110 §7.6.1)."""

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
    b"accept-encoding",  # what comes back is passed on as it is, and an error may have to be added to it
    b"x-request-id", b"traceparent",
    b"forwarded", b"x-real-ip", b"x-client-ip", b"x-cluster-client-ip", b"true-client-ip", b"cf-connecting-ip",
    b"fastly-client-ip",
}  # fmt: skip
_UNCHECKED = (
    b"x-forwarded-", b"x-original-", b"x-auth-request-", b"x-remote-", b"remote-", b"x-ssl-client-", b"ssl-client-",
    b"x-amzn-oidc-", b"x-goog-authenticated-user-", b"x-ms-client-",
)  # fmt: skip
"""How names begin that say who asks, and how: servers believe a proxy in front of them, and nobody has checked it."""
_NOT_FROM_SERVER = _HOP | {b"content-length", b"content-type", b"date", b"server", b"x-request-id"}
_CORS = b"access-control-"
_RATES = b"x-ratelimit-"


def to_server(fields: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
    """Lines of a client's fields (names in lower case) that are for the server, too."""
    kept: list[tuple[bytes, bytes]] = []
    listed: set[bytes] = set()
    for name, value in fields:
        plain = name.replace(b"_", b"-")  # for many servers these are the same
        if plain == b"connection":
            listed |= _options(value)
        elif plain not in _NOT_TO_SERVER and not plain.startswith(_UNCHECKED):
            kept.append((name, value))
    return [b"%b: %b\r\n" % field for field in kept if field[0] not in listed]


def from_server(fields: Fields, *, own_rates: bool) -> tuple[bytes, bytes]:
    """The content type, and lines of a server's fields that are for the client, too. ``own_rates``: the client is told
    of our limits, so not of the server's."""
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
    """Of a Connection field: names of fields that are for this hop only, among others."""
    return {option.strip() for option in value.lower().split(b",")}
