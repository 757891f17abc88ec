"""Header fields on their way through: which go on to a server, and which come back from it (RFC 9110 §7.6.1)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["Fields", "from_server", "to_server"]

Fields = Sequence[tuple[bytes, bytes]]

_HOP = frozenset(
    (b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te",
     b"trailer", b"transfer-encoding", b"upgrade")
)  # fmt: skip
_NOT_TO_SERVER = _HOP | {
    b"host", b"content-length", b"content-encoding", b"expect",
    b"authorization",  # it is for us; the server has a key of its own
    b"accept-encoding",  # what comes back is passed on as it is, and an error may have to be added to it
    b"x-request-id", b"traceparent",
    # who asks: nobody has checked it
    b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-forwarded-proto", b"x-real-ip",
}  # fmt: skip
_NOT_FROM_SERVER = _HOP | {b"content-length", b"content-type", b"date", b"server", b"x-request-id"}
_CORS = b"access-control-"
_RATES = b"x-ratelimit-"


def to_server(fields: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
    """Lines of a client's fields (names in lower case) that are for the server, too."""
    lines: list[bytes] = []
    listed: list[bytes] = []
    for name, value in fields:
        if name not in _NOT_TO_SERVER:
            lines.append(b"%b: %b\r\n" % (name, value))
        elif name == b"connection":
            listed += [option.strip() for option in value.lower().split(b",")]
    if listed and (named := [option for option in listed if option not in (b"", b"close", b"keep-alive")]):
        starts = tuple([option + b":" for option in named])
        return [line for line in lines if not line.startswith(starts)]
    return lines


def from_server(fields: Fields, *, own_rates: bool) -> tuple[bytes, bytes]:
    """The content type, and lines of a server's fields that are for the client, too. ``own_rates``: the client is told
    of our limits, so not of the server's."""
    kind = b""
    lines: list[bytes] = []
    listed: list[bytes] = []
    for name, value in fields:
        if name == b"content-type":
            kind = value
        elif name == b"connection":
            listed += [option.strip() for option in value.lower().split(b",")]
        elif name not in _NOT_FROM_SERVER and not name.startswith((_CORS, _RATES) if own_rates else _CORS):
            lines.append(b"%b: %b\r\n" % (name, value))
    if listed and (named := [option for option in listed if option not in (b"", b"close", b"keep-alive")]):
        starts = tuple([option + b":" for option in named])
        lines = [line for line in lines if not line.startswith(starts)]
    return kind, b"".join(lines)
