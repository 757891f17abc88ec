"""The block metadata in Redis. This page is the only place where its layout is defined; see docs/kvstore.md.

All keys begin with ``pinyon:v1:``; another version of the layout gets another prefix and shares nothing. ``<node>`` is
a store node's instance id, ``<boot>`` the 32 hex digits of its process life, ``<life>`` is ``<node>/<boot>``.

===========================  ======  ===================================================================================
key                          type    content
===========================  ======  ===================================================================================
``node:<node>``              string  JSON ``{"boot", "address", "capacity_bytes"}``; expires with the node's lease
``lives``                    set     every ``<life>`` that may have entries here
``block:<key as 32 hex>``    hash    field ``<life>`` → size of the replica in bytes, as decimal digits
``index:<life>``             set     raw 16-byte keys of the blocks that this life has listed
===========================  ======  ===================================================================================

Rules:

- A replica is readable if the record ``node:<node>`` is there *and* names the replica's boot. So the entries of a dead
  or restarted node are void at once, before anybody has cleaned up.
- A node lists a block after it became readable and unlists it after it is gone; a reader therefore may find an entry
  without an object (the node says so when asked), never an object's entry with other bytes behind it.
- Writing an entry puts it into the index first, so the index names all entries of a life. Purging a life goes through
  its index in bounded steps. A node purges its own earlier lives when it starts, and the lives of nodes that have
  been without a record for a while.
- A value that does not parse is ignored and counted: Redis is shared, and what is in it is outside data.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from pinyon.core.block_keys import KEY_BYTES
from pinyon.core.errors import FailedPrecondition, InvalidArgument, Unavailable

__all__ = ["Life", "NodeRecord", "Replica", "StoreMetadata", "parse_life", "parse_node", "parse_replica"]

PREFIX = "pinyon:v1:"
BATCH = 512
"""Blocks per pipeline: bounds one round trip and the reply's memory."""
MAX_NODES = 1024
MAX_OBJECT_BYTES = 1 << 40

T = TypeVar("T")

_NODE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_BOOT_ID = re.compile(r"[0-9a-f]{32}")
_ADDRESS = re.compile(r"\S{1,255}:\d{1,5}")


class Life(NamedTuple):
    """One life of one node's process."""

    node_id: str
    boot_id: str

    def __str__(self) -> str:
        return f"{self.node_id}/{self.boot_id}"


@dataclass(frozen=True)
class NodeRecord:
    """A live store node. ``address`` is its gRPC ``host:port``."""

    node_id: str
    boot_id: str
    address: str
    capacity_bytes: int = 0

    def __post_init__(self) -> None:
        if not _NODE_ID.fullmatch(self.node_id):
            raise InvalidArgument(f"not a node id: {self.node_id!r} ({_NODE_ID.pattern})", field="node_id")
        if not _BOOT_ID.fullmatch(self.boot_id):
            raise InvalidArgument("a boot id is 32 hex digits", field="boot_id")
        if not _ADDRESS.fullmatch(self.address):
            raise InvalidArgument(f"{self.address!r} is not host:port", field="address")
        if not 0 <= self.capacity_bytes < 1 << 63:
            raise InvalidArgument("no such capacity", field="capacity_bytes")

    @property
    def life(self) -> Life:
        return Life(self.node_id, self.boot_id)


class Replica(NamedTuple):
    """A copy of a block: where, and its size in bytes."""

    node: NodeRecord
    size_bytes: int


def parse_life(raw: bytes) -> Life | None:
    """``<node>/<boot>``, or ``None`` for anything else."""
    try:
        node_id, _, boot_id = raw.decode("ascii").partition("/")
    except UnicodeDecodeError:
        return None
    return Life(node_id, boot_id) if _NODE_ID.fullmatch(node_id) and _BOOT_ID.fullmatch(boot_id) else None


def parse_node(node_id: str, raw: bytes) -> NodeRecord | None:
    """The record stored for ``node_id``, or ``None`` if it is not one."""
    try:
        value = json.loads(raw)
        boot_id, address, capacity = value["boot"], value["address"], value["capacity_bytes"]
        if type(boot_id) is str and type(address) is str and type(capacity) is int:
            return NodeRecord(node_id, boot_id, address, capacity)
    except (ValueError, TypeError, KeyError, RecursionError, InvalidArgument):
        pass
    return None


def parse_replica(field: bytes, value: bytes) -> tuple[Life, int] | None:
    """One field of a block's hash as ``(life, size in bytes)``, or ``None`` if it is not one."""
    life = parse_life(field)
    if life is None or not value.isdigit() or len(value) > 16:
        return None
    size = int(value)
    return (life, size) if 0 < size <= MAX_OBJECT_BYTES else None


class StoreMetadata:
    """The layout above as operations. Every call is bounded and raises :class:`Unavailable` when Redis is."""

    def __init__(self, url: str, *, timeout_s: float = 1.0, max_connections: int = 8) -> None:
        """Connects on first use. Raises :class:`InvalidArgument` for a URL that is none."""
        try:
            pool = BlockingConnectionPool.from_url(
                url,
                max_connections=max_connections,
                timeout=timeout_s,
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
                health_check_interval=15,
                # One more try: a pooled connection that the server has closed meanwhile is no failure.
                retry=Retry(ExponentialBackoff(cap=0.2, base=0.02), 1),
                retry_on_error=[RedisConnectionError],
            )
        except ValueError as error:
            raise InvalidArgument(f"not a Redis URL: {error}", field="redis_url") from None
        pool.connection_kwargs["decode_responses"] = False  # keys are raw bytes, whatever the URL says
        self._redis: Redis = Redis(connection_pool=pool)
        self._pool = pool
        self.malformed = 0
        """Values that were ignored because they do not parse."""

    async def close(self) -> None:
        await self._redis.aclose()
        await self._pool.aclose()

    async def _ask(self, answer: Awaitable[Any]) -> Any:
        task = asyncio.current_task()
        cancels = task.cancelling() if task else 0
        try:
            reply = await answer
        except (RedisError, OSError) as error:
            self._pass_on_cancel(task, cancels)
            raise Unavailable(f"Redis: {type(error).__name__}") from error
        self._pass_on_cancel(task, cancels)
        return reply

    @staticmethod
    def _pass_on_cancel(task: asyncio.Task[Any] | None, before: int) -> None:
        """redis-py sends within ``asyncio.wait_for``, which on Python 3.11 may swallow a cancellation."""
        if task is not None and task.cancelling() > before:
            raise asyncio.CancelledError

    async def _pipeline(self, build: Callable[[Any], None]) -> list[Any]:
        async with self._redis.pipeline(transaction=False) as pipe:
            build(pipe)
            replies: list[Any] = await self._ask(pipe.execute(raise_on_error=False))
        return replies

    # -- nodes

    async def register(self, node: NodeRecord, lease_s: float) -> None:
        """Announce a new life; it takes over from any earlier one of this node id."""

        def build(pipe: Any) -> None:
            pipe.sadd(f"{PREFIX}lives", str(node.life))
            pipe.set(f"{PREFIX}node:{node.node_id}", _record(node), px=_ms(lease_s))

        self._raise_first(await self._pipeline(build))

    async def renew(self, node: NodeRecord, lease_s: float) -> bool:
        """Keep the record alive. False: it was gone, so entries may be too; list everything again.

        Raises :class:`FailedPrecondition` if another process has taken the node id.
        """
        raw = await self._ask(self._redis.get(f"{PREFIX}node:{node.node_id}"))
        present = None if raw is None else parse_node(node.node_id, raw)
        if present is not None and present.boot_id != node.boot_id:
            raise FailedPrecondition(f"another process runs as store node {node.node_id!r}")
        await self.register(node, lease_s)
        return present is not None

    async def leave(self, node: NodeRecord) -> None:
        """Remove the record (if it is ours): from now on nothing of this life is readable."""
        raw = await self._ask(self._redis.get(f"{PREFIX}node:{node.node_id}"))
        present = None if raw is None else parse_node(node.node_id, raw)
        if present is not None and present.boot_id == node.boot_id:
            await self._ask(self._redis.delete(f"{PREFIX}node:{node.node_id}"))

    async def lives(self) -> set[Life]:
        """All lives that may have entries, the dead ones too."""
        raw = await self._ask(self._redis.smembers(f"{PREFIX}lives"))
        return set(self._parsed(parse_life(member) for member in raw))

    async def nodes(self) -> list[NodeRecord]:
        """The live nodes, by id; at most ``MAX_NODES``."""
        names = sorted({life.node_id for life in await self.lives()})[:MAX_NODES]
        if not names:
            return []
        raws = await self._ask(self._redis.mget([f"{PREFIX}node:{name}" for name in names]))
        return sorted(
            self._parsed(parse_node(name, raw) for name, raw in zip(names, raws, strict=True) if raw is not None),
            key=lambda node: node.node_id,
        )

    # -- blocks

    async def add(self, life: Life, blocks: Sequence[tuple[bytes, int]]) -> None:
        """List blocks as ``(key, size in bytes)``."""
        for start in range(0, len(blocks), BATCH):
            batch = blocks[start : start + BATCH]

            def build(pipe: Any, batch: Sequence[tuple[bytes, int]] = batch) -> None:
                pipe.sadd(f"{PREFIX}index:{life}", *[key for key, _ in batch])
                for key, size in batch:
                    pipe.hset(_block(key), str(life), size)

            self._count_errors(await self._pipeline(build))

    async def discard(self, life: Life, keys: Sequence[bytes]) -> None:
        """Unlist blocks."""
        for start in range(0, len(keys), BATCH):
            batch = keys[start : start + BATCH]

            def build(pipe: Any, batch: Sequence[bytes] = batch) -> None:
                for key in batch:
                    pipe.hdel(_block(key), str(life))
                pipe.srem(f"{PREFIX}index:{life}", *batch)

            self._count_errors(await self._pipeline(build))

    async def locate(self, keys: Sequence[bytes], nodes: Iterable[NodeRecord] | None = None) -> list[list[Replica]]:
        """Per key, its replicas on live nodes (``nodes``, if the caller has just asked for them)."""
        live = {str(node.life): node for node in (await self.nodes() if nodes is None else nodes)}
        if not live:
            return [[] for _ in keys]
        located: list[list[Replica]] = []
        for start in range(0, len(keys), BATCH):
            batch = keys[start : start + BATCH]

            def build(pipe: Any, batch: Sequence[bytes] = batch) -> None:
                for key in batch:
                    pipe.hgetall(_block(key))

            located += [self._replicas(reply, live) for reply in await self._pipeline(build)]
        return located

    def _replicas(self, reply: Any, live: dict[str, NodeRecord]) -> list[Replica]:
        if not isinstance(reply, dict):  # an error: somebody put another type there
            self.malformed += 1
            return []
        parsed = self._parsed(parse_replica(field, value) for field, value in reply.items())
        return [Replica(live[str(life)], size) for life, size in sorted(parsed) if str(life) in live]

    async def purge(self, life: Life, max_blocks: int) -> int:
        """Unlist up to ``max_blocks`` blocks of a life that is over; how many. Fewer: there is nothing left of it."""
        index = f"{PREFIX}index:{life}"
        purged = 0
        while purged < max_blocks:
            if await self._ask(self._redis.type(index)) not in (b"set", b"none"):
                self.malformed += 1
                await self._ask(self._redis.delete(index))
            found = await self._ask(self._redis.srandmember(index, min(BATCH, max_blocks - purged)))
            if not found:
                await self._ask(self._redis.srem(f"{PREFIX}lives", str(life)))
                break
            await self.discard(life, [key for key in found if len(key) == KEY_BYTES])
            foreign = [key for key in found if len(key) != KEY_BYTES]
            if foreign:
                self.malformed += len(foreign)
                await self._ask(self._redis.srem(index, *foreign))
            purged += len(found)
        return purged

    # -- helpers

    def _parsed(self, values: Iterable[T | None]) -> list[T]:
        """The values that parsed; the others are counted."""
        found = []
        for value in values:
            if value is None:
                self.malformed += 1
            else:
                found.append(value)
        return found

    def _count_errors(self, replies: list[Any]) -> None:
        """A key of another type loses one entry, not the batch; anything else is a failure."""
        for reply in replies:
            if isinstance(reply, RedisError):
                if "WRONGTYPE" not in str(reply):
                    raise Unavailable(f"Redis: {reply}") from reply
                self.malformed += 1

    def _raise_first(self, replies: list[Any]) -> None:
        for reply in replies:
            if isinstance(reply, RedisError):
                raise Unavailable(f"Redis: {reply}") from reply


def _record(node: NodeRecord) -> str:
    return json.dumps({"boot": node.boot_id, "address": node.address, "capacity_bytes": node.capacity_bytes})


def _block(key: bytes) -> str:
    return f"{PREFIX}block:{key.hex()}"


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))
