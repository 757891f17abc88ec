"""API keys that servers want of us, from a file."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from pinyon.core.errors import InvalidArgument
from pinyon.frontdoor.upstreams.url import parse_upstreams

FILE_BYTES_MAX = 1 << 20
_KEY = re.compile(r"[!-~]{1,4096}")


@dataclass(frozen=True, slots=True)
class UpstreamKeys:
    """``default`` is for servers that no line names, and that this load balancer's own settings name."""

    default: str = field(default="", repr=False)
    by_server: dict[str, str] = field(default_factory=dict, repr=False)

    def of(self, server: str, *, own: bool) -> str:
        """``own``: settings name it. Of another one somebody else has told the URL: it may be a stranger's."""
        return self.by_server.get(server, self.default if own else "")


NO_KEYS = UpstreamKeys()


def read_upstream_keys(path: str) -> UpstreamKeys:
    """Lines ``KEY``, for all servers of ``--upstream``, or ``URL KEY``, for one; ``#`` begins a comment line. An empty
    path: no keys.

    Raises :class:`InvalidArgument`; the message never holds a key.
    """
    if not path:
        return NO_KEYS
    try:
        with Path(path).open("rb") as file:
            raw = file.read(FILE_BYTES_MAX + 1)
        text = raw.decode("ascii")
    except OSError as error:
        raise _bad(f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise _bad("is not ASCII") from None
    if len(raw) > FILE_BYTES_MAX:
        raise _bad(f"is larger than {FILE_BYTES_MAX} bytes")
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
