"""Clients of Redis, whatever its URL names. With TLS, connections use the newest files of this process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.connection import ConnectionPool, SSLConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool, SentinelManagedSSLConnection
from redis.backoff import ExponentialBackoff
from redis.exceptions import ConnectionError as RedisConnectionError

from pinyon.core.errors import InvalidArgument
from pinyon.runtime.redis_url import CLUSTER, SENTINELS, RedisUrl, parse_redis_url

if TYPE_CHECKING:
    from pinyon.runtime.tls import Tls

RedisClient = Redis | RedisCluster

CONNECTIONS_MAX = 8
POOLED_MAX = 64
"""The limit of connections where the pool cannot wait for a free one."""


def connect_redis(url: str, timeout_s: float, *, tls: Tls | None = None) -> RedisClient:
    """Returns a client that connects on first use; ``timeout_s`` limits connecting and each answer.

    Keys and values are raw bytes, whatever the URL says. Raises :class:`InvalidArgument` if it is no URL."""
    parsed = parse_redis_url(url)
    terms: dict[str, Any] = {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "health_check_interval": 15,
        # One retry, as it is no failure if the server has closed a pooled connection meanwhile.
        "retry": Retry(ExponentialBackoff(cap=0.2, base=0.02), 1),
        "retry_on_error": [RedisConnectionError],
    }
    login: dict[str, Any] = {"username": parsed.username, "password": parsed.password}
    if parsed.kind == CLUSTER:
        nodes = [ClusterNode(host, port) for host, port in parsed.hosts]
        cluster = RedisCluster(startup_nodes=nodes, ssl=parsed.tls, max_connections=POOLED_MAX, **terms, **login)
        if parsed.tls and tls is not None:
            _use_tls_in_cluster(cluster, tls)
        return cluster
    if parsed.kind == SENTINELS:
        return _watched_master(parsed, terms | login, tls)
    try:
        pool = BlockingConnectionPool.from_url(url, max_connections=CONNECTIONS_MAX, timeout=timeout_s, **terms)
    except ValueError as error:
        raise InvalidArgument(f"not a Redis URL: {error}", field="redis_url") from None
    _use_tls(pool, tls, _Connection)
    pool.connection_kwargs["decode_responses"] = False
    return Redis.from_pool(pool)


async def close_redis(client: RedisClient) -> None:
    """Closes the client's connections, and those to its Sentinels."""
    await client.aclose()
    if isinstance(client, Redis) and isinstance(client.connection_pool, SentinelConnectionPool):
        for watching in client.connection_pool.sentinel_manager.sentinels:
            await watching.aclose()


def _watched_master(parsed: RedisUrl, terms: dict[str, Any], tls: Tls | None) -> Redis:
    asking = {name: terms[name] for name in ("socket_timeout", "socket_connect_timeout")} | {"ssl": parsed.tls}
    terms |= {"sentinel_kwargs": asking, "ssl": parsed.tls, "db": parsed.db}
    watch = Sentinel(parsed.hosts, **terms)  # type: ignore[no-untyped-call]
    for each in watch.sentinels:
        _use_tls(each.connection_pool, tls, _Connection)
    client: Redis = watch.master_for(parsed.name, max_connections=POOLED_MAX)
    _use_tls(client.connection_pool, tls, _MasterConnection)
    return client


class _Connection(SSLConnection):
    def __init__(self, tls: Tls, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        # redis-py's own reads the files once per connection object, and also trusts the system's authorities.
        self.ssl_context = SimpleNamespace(get=lambda: tls.client_context)  # type: ignore[assignment]


class _MasterConnection(_Connection, SentinelManagedSSLConnection):
    """A connection to the master that Sentinels name."""


def _use_tls(pool: ConnectionPool, tls: Tls | None, connection: type[SSLConnection]) -> None:
    if tls is not None and issubclass(pool.connection_class, SSLConnection):
        pool.connection_class = connection
        pool.connection_kwargs["tls"] = tls


def _use_tls_in_cluster(cluster: RedisCluster, tls: Tls) -> None:
    """Makes the connections to a cluster's servers, known now or later, use these files."""
    cluster.connection_kwargs |= {"connection_class": _Connection, "tls": tls}
    for node in cluster.startup_nodes:
        node.connection_class = _Connection
        node.connection_kwargs["tls"] = tls
