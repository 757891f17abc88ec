"""CORS: the web pages that may send requests (https://fetch.spec.whatwg.org/#http-cors-protocol); none by default.

Credentials are never allowed: API keys travel in a header that the page sets, not in cookies."""

from __future__ import annotations

import re
from collections.abc import Iterable

from pinyon.core.errors import InvalidArgument
from pinyon.http.answer import field

ORIGINS_MAX = 100
MAX_AGE_S = 600
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[a-z0-9._\[\]:-]{1,255}")
_NAMES = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,64}(?: ?, ?[A-Za-z0-9!#$%&'*+.^_`|~-]{1,64}){0,63}")
_EXPOSED = field(
    b"access-control-expose-headers",
    "x-request-id, retry-after, x-ratelimit-limit-requests, x-ratelimit-remaining-requests, "
    "x-ratelimit-reset-requests, x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens",
)


class Cors:
    """The allowed ``origins``: ``*``, or ``https://a.example,http://localhost:3000``; empty for none."""

    def __init__(self, origins: str) -> None:
        """Parses the origins. Raises :class:`InvalidArgument`."""
        names = [name.strip().lower() for name in origins.split(",") if name.strip()]
        self._all = names == ["*"]
        for name in () if self._all else names:
            if not _ORIGIN.fullmatch(name):
                raise InvalidArgument(
                    f"{name[:100]!r} is no origin: * alone, or scheme://host[:port] with commas between them",
                    field="cors_origins",
                )
        if len(names) > ORIGINS_MAX:
            raise InvalidArgument(f"at most {ORIGINS_MAX} origins, got {len(names)}", field="cors_origins")
        self._origins = frozenset(name.encode("ascii") for name in names)

    def __bool__(self) -> bool:
        return bool(self._origins)

    def fields(self, request: Iterable[tuple[bytes, bytes]], *, preflight: bool = False) -> bytes:
        """Returns the CORS fields of the answer to a request with these fields; at most ``vary`` for other origins."""
        origin = method = names = b""
        for name, value in request:
            if name == b"origin":
                origin = value.strip().lower()
            elif name == b"access-control-request-method":
                method = value
            elif name == b"access-control-request-headers":
                names = value.strip()
        vary = b"" if self._all else field(b"vary", "origin")
        if not origin or not (self._all or origin in self._origins):
            return vary
        found = field(b"access-control-allow-origin", b"*" if self._all else origin) + vary
        if not preflight:
            return found + _EXPOSED
        if method:
            found += field(b"access-control-allow-methods", "GET, POST")
            found += field(b"access-control-max-age", str(MAX_AGE_S))
            if _NAMES.fullmatch(names):
                found += field(b"access-control-allow-headers", names)
        return found
