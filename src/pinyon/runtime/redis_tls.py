"""TLS to Redis, as connections of ``redis.asyncio`` that use the newest files of this process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from redis.asyncio.connection import ConnectionPool, SSLConnection

if TYPE_CHECKING:
    from pinyon.runtime.tls import Tls


class _Connection(SSLConnection):
    def __init__(self, tls: Tls, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        # redis-py's own reads the files once per connection object, and also trusts the system's authorities.
        self.ssl_context = SimpleNamespace(get=lambda: tls.client_context)  # type: ignore[assignment]


def use_tls(pool: ConnectionPool, tls: Tls | None) -> None:
    """Makes the pool's connections use these files, if its URL was ``rediss://``."""
    if tls is not None and issubclass(pool.connection_class, SSLConnection):
        pool.connection_class = _Connection
        pool.connection_kwargs["tls"] = tls
