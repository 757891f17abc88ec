"""The URL of a Redis: one server, a master that Sentinels name, or a Redis Cluster."""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from pinyon.core.address import parse_address
from pinyon.core.errors import InvalidArgument

SENTINELS, CLUSTER = "sentinel", "cluster"
_FORMS = (
    "redis://HOST:PORT/DB, redis+sentinel://HOST:PORT,HOST:PORT/NAME/DB or redis+cluster://HOST:PORT,HOST:PORT; "
    "rediss for TLS"
)
_PATH_PARTS = {"": (0, 1), SENTINELS: (1, 2), CLUSTER: (0, 0)}


class RedisUrl(NamedTuple):
    """A parsed URL. One server has an empty ``kind``; redis-py knows further forms of its URL."""

    kind: str
    tls: bool
    hosts: tuple[tuple[str, int], ...]
    name: str = ""
    """The name of the master that the Sentinels watch."""
    db: int = 0
    username: str | None = None
    password: str | None = None


def parse_redis_url(url: str) -> RedisUrl:
    """Parses a URL. Raises :class:`InvalidArgument`, which names the forms."""
    scheme, _, rest = url.partition("://")
    base, _, kind = scheme.partition("+")
    try:
        if scheme == "unix":
            return RedisUrl("", tls=False, hosts=())
        if base not in ("redis", "rediss") or kind not in _PATH_PARTS:
            raise ValueError("unknown scheme")
        parts = urlsplit(f"//{rest}")
        login, _, netloc = parts.netloc.rpartition("@")
        path = [unquote(each) for each in parts.path.split("/")[1:] if each]
        least, most = _PATH_PARTS[kind]
        if not least <= len(path) <= most:
            raise ValueError("unknown path")
        hosts = tuple(_host(each) for each in netloc.split(","))
        if not kind and len(hosts) > 1:
            raise ValueError("several hosts")
        db = int(path[least]) if len(path) > least else 0
    except (ValueError, InvalidArgument):
        raise InvalidArgument(f"not a Redis URL; these are: {_FORMS}", field="redis_url") from None
    username, _, password = login.partition(":")
    name = path[0] if kind == SENTINELS else ""
    return RedisUrl(kind, base == "rediss", hosts, name, db, unquote(username) or None, unquote(password) or None)


def _host(text: str) -> tuple[str, int]:
    has_port = text.rpartition(":")[2].isdecimal()
    return parse_address(text if has_port else f"{text or 'localhost'}:6379")
