"""HTTP/2 headers of gRPC: requests, answers, and how a call ended.

By gRPC's protocol over HTTP/2, messages are percent-encoded, binary metadata is base64, and timeouts have 8 digits."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil
from urllib.parse import quote_from_bytes, unquote_to_bytes

from pinyon.runtime.http2.stream import Field

Metadata = Sequence[tuple[str, str | bytes]]

CODES = (
    "OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS",
    "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED",
    "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED",
)  # fmt: skip
"""The gRPC status codes by their numbers."""
_BY_HTTP = {
    400: "INTERNAL", 401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "UNIMPLEMENTED", 429: "UNAVAILABLE",
    502: "UNAVAILABLE", 503: "UNAVAILABLE", 504: "UNAVAILABLE",
}  # fmt: skip
ANSWER: tuple[Field, ...] = ((b":status", b"200"), (b"content-type", b"application/grpc"))
"""The headers before an answer's first message."""
_UNITS_S = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_TIMEOUT = re.compile(rb"([0-9]{1,8})([HMSmun])")
_PRINTABLE = bytes(each for each in range(0x20, 0x7F) if each != ord("%"))
# The rules that make a request malformed in HTTP/2 (RFC 9113, 8.2 and 8.3).
_OF_CONNECTIONS = frozenset((b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"))
_PSEUDO = frozenset((b":method", b":scheme", b":path", b":authority"))
_FIELD_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9a-z-]+")
_NOT_IN_VALUES = re.compile(rb"[\0\r\n]")
_NAME = re.compile(r"[0-9a-z_.-]+")
MESSAGE_BYTES = 2048
"""The bytes to which an error's message is cut on the wire, as peers take 8 KiB of headers."""


@dataclass(frozen=True, slots=True)
class Http2RequestHead:
    path: str
    timeout_s: float | None
    metadata: Metadata


@dataclass(frozen=True, slots=True)
class Trailers:
    code: str
    """The name of the gRPC status."""
    message: str
    metadata: Metadata


def request_head(path: str, authority: str, scheme: str) -> list[Field]:
    """Returns a request's headers; ``path`` is ``/package.Service/Method``."""
    return [
        (b":method", b"POST"),
        (b":scheme", scheme.encode()),
        (b":path", path.encode()),
        (b":authority", authority.encode()),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
        (b"user-agent", b"pinyon"),
    ]


def timeout_field(timeout_s: float) -> Field:
    """Returns the header of a deadline, up to 10 % later: so few differ, and hpack sends known ones as a byte.

    The caller keeps to its own deadline."""
    left_ms = max(1, ceil(min(timeout_s, 99_000.0) * 1e3))
    step = 10 ** max(0, len(str(left_ms)) - 2)
    return b"grpc-timeout", b"%dm" % (-(-left_ms // step) * step)


def parse_request(fields: Iterable[Field]) -> Http2RequestHead | int:
    """Parses a request's headers; returns an HTTP status for those of no gRPC request."""
    pseudo: dict[bytes, bytes] = {}
    regular = False
    kind = b""
    timeout_s: float | None = None
    metadata: list[tuple[str, str | bytes]] = []
    for name, value in fields:
        if _NOT_IN_VALUES.search(value):
            return 400
        if name.startswith(b":"):
            if regular or name not in _PSEUDO or name in pseudo:
                return 400
            pseudo[name] = value
            continue
        regular = True
        if name in _OF_CONNECTIONS or not _FIELD_NAME.fullmatch(name) or (name == b"te" and value != b"trailers"):
            return 400
        if name == b"content-type":
            kind = value
        elif name == b"grpc-timeout":
            match = _TIMEOUT.fullmatch(value)
            if match is None:
                return 400
            timeout_s = int(match[1]) * _UNITS_S[match[2]]
        elif not name.startswith(b"grpc-") and name not in (b"te", b"user-agent"):
            metadata.extend(_metadata(name, value))
    if pseudo.get(b":method") != b"POST":
        return 405
    if not kind.startswith(b"application/grpc") or kind[16:17] not in (b"", b"+", b";"):
        return 415
    path = pseudo.get(b":path", b"")
    if not path.startswith(b"/") or not path.isascii() or b":scheme" not in pseudo:
        return 400
    return Http2RequestHead(path.decode("ascii"), timeout_s, metadata)


def is_answer(fields: Iterable[Field]) -> bool:
    """Returns whether these are the headers of a gRPC answer."""
    found = dict(fields)
    return found.get(b":status") == b"200" and found.get(b"content-type", b"").startswith(b"application/grpc")


def trailers(code: str, message: str = "", metadata: Metadata = ()) -> list[Field]:
    """Returns trailers; ``code`` is the name of a gRPC status code."""
    fields: list[Field] = [(b"grpc-status", str(CODES.index(code)).encode())]
    if message:
        text = message.encode("utf-8", "replace")[:MESSAGE_BYTES]
        fields.append((b"grpc-message", quote_from_bytes(text, safe=_PRINTABLE).encode()))
    return [*fields, *_fields(metadata)]


def parse_trailers(fields: Iterable[Field]) -> Trailers:
    """Returns how a call ended; an answer that is not gRPC's is described by its HTTP status."""
    status = http = b""
    message = ""
    metadata: list[tuple[str, str | bytes]] = []
    for name, value in fields:
        if name == b"grpc-status":
            status = value
        elif name == b"grpc-message":
            message = unquote_to_bytes(value).decode("utf-8", "replace")
        elif name == b":status":
            http = value
        elif not name.startswith((b":", b"grpc-")) and name != b"content-type":
            metadata.extend(_metadata(name, value))
    if status.isdigit() and len(status) < 4:
        number = int(status)
        return Trailers(CODES[number] if number < len(CODES) else "UNKNOWN", message, metadata)
    if http.isdigit() and len(http) == 3 and http != b"200":
        return Trailers(_BY_HTTP.get(int(http), "UNKNOWN"), f"the peer answered with HTTP status {int(http)}", metadata)
    return Trailers("UNKNOWN", "the peer ended the call without a status", metadata)


def _fields(metadata: Metadata) -> Iterable[Field]:
    for name, value in metadata:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} cannot be the name of a header")
        if isinstance(value, bytes):
            yield name.encode(), base64.b64encode(value).rstrip(b"=")
        else:
            yield name.encode(), value.encode("ascii", "replace")


def _metadata(name: bytes, value: bytes) -> Iterable[tuple[str, str | bytes]]:
    text = name.decode("ascii", "replace")
    if not name.endswith(b"-bin"):
        yield text, value.decode("ascii", "replace")
        return
    for part in value.split(b","):
        try:
            yield text, base64.b64decode(part + b"=" * (-len(part) % 4))
        except binascii.Error:  # a peer's bad encoding must not raise here
            yield text, b""
