"""The parsing of servers' URLs, ``http://host:port/prefix``, and of files with their API keys."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from pinyon.core.errors import InvalidArgument
from pinyon.runtime.files import read_file

UPSTREAMS_MAX = 1024
FILE_BYTES_MAX = 1 << 20
_KEY = re.compile(r"[!-~]{1,4096}")
_PORTS = {"http": 80, "https": 443}
_PREFIX = re.compile(r"(?:/[A-Za-z0-9._~!$&'()*+,;=:@%-]+)*")
_HOST = re.compile(r"[A-Za-z0-9._-]{1,253}|[0-9A-Fa-f:.]{2,45}")


@dataclass(frozen=True, slots=True)
class UpstreamUrl:
    """The URL of a server. ``prefix`` is the path before ``/v1``: empty, or starting but not ending with a slash."""

    host: str
    port: int
    tls: bool
    prefix: str = ""

    @property
    def authority(self) -> str:
        """The value of the Host field, without a default port."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self._scheme] else f"{host}:{self.port}"

    @property
    def _scheme(self) -> str:
        return "https" if self.tls else "http"

    def __str__(self) -> str:
        return f"{self._scheme}://{self.authority}{self.prefix}"


def parse_upstreams(text: str) -> tuple[UpstreamUrl, ...]:
    """Parses URLs with commas between them; each may end with ``/v1``, as all routes begin with it.

    Raises :class:`InvalidArgument` that names what is wrong."""
    found: list[UpstreamUrl] = []
    for part in text.split(","):
        url = _parse(part.strip())
        if url in found:
            raise InvalidArgument(f"{url} is named twice", field="upstream")
        found.append(url)
    if len(found) > UPSTREAMS_MAX:
        raise InvalidArgument(f"at most {UPSTREAMS_MAX} servers may be named", field="upstream")
    return tuple(found)


def _parse(text: str) -> UpstreamUrl:
    if not text.isascii() or not text.isprintable() or " " in text:
        raise _wrong(text, "is no URL")
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise _wrong(text, "is no URL") from None
    if parts.scheme not in _PORTS or not host:
        raise _wrong(text, "must begin with http://HOST or https://HOST")
    if parts.username is not None or parts.password is not None:
        raise InvalidArgument(
            "a server's URL must not hold a password: --upstream-api-key-file is for keys", field="upstream"
        )
    if parts.query or parts.fragment or "?" in text or "#" in text:
        raise _wrong(text, "must not have a query")
    if not _HOST.fullmatch(host) or port == 0:
        raise _wrong(text, "has no host and port to connect to")
    prefix = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    if not _PREFIX.fullmatch(prefix):
        raise _wrong(text, "has a path that cannot be asked for")
    return UpstreamUrl(host, port or _PORTS[parts.scheme], parts.scheme == "https", prefix)


def _wrong(text: str, what: str) -> InvalidArgument:
    return InvalidArgument(f"{text[:200]!r} {what}", field="upstream")


@dataclass(frozen=True, slots=True)
class UpstreamKeys:
    """The keys of servers. ``default`` is for servers without a line that this load balancer's own settings name."""

    default: str = field(default="", repr=False)
    by_server: dict[str, str] = field(default_factory=dict, repr=False)

    def of(self, server: str, *, own: bool) -> str:
        """Returns the key for a server; ``own`` if settings name it. Any other URL may be a stranger's."""
        return self.by_server.get(server, self.default if own else "")


def read_upstream_keys(path: str) -> UpstreamKeys:
    """Reads a file of lines ``KEY``, for all servers of ``--upstream``, or ``URL KEY``, for one; ``#`` begins a
    comment. An empty path means no keys.

    Raises :class:`InvalidArgument`; the message never holds a key."""
    if not path:
        return UpstreamKeys()
    try:
        text = read_file(path, FILE_BYTES_MAX, "upstream_api_key_file").decode("ascii")
    except UnicodeDecodeError:
        raise _bad("is not ASCII") from None
    default, by_server = "", {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) > 2 or not _KEY.fullmatch(words[-1]):
            raise _bad(f"line {number} is not 'KEY' or 'URL KEY'")
        if len(words) == 1:
            if default:
                raise _bad(f"line {number} is a second key for all servers")
            default = words[0]
            continue
        try:
            (url,) = parse_upstreams(words[0])
        except (InvalidArgument, ValueError):
            raise _bad(f"line {number} does not begin with a server's URL") from None
        if str(url) in by_server:
            raise _bad(f"line {number} is a second key for its server")
        by_server[str(url)] = words[1]
    if not default and not by_server:
        raise _bad("holds no key")
    return UpstreamKeys(default, by_server)


def _bad(what: str) -> InvalidArgument:
    return InvalidArgument(f"the upstream API key file {what}", field="upstream_api_key_file")
