"""The block metadata in Redis. Only this module defines its layout; see docs/design/store.md.

All keys begin with ``pinyon:v1:``. Another version of the layout gets another prefix and shares nothing. In the keys,
``<node>`` is a store node's instance id, ``<boot>`` the 32 hex digits of its process life, ``<life>`` is
``<node>/<boot>``. Key, type and content:

- ``node:<node>``, string: JSON ``{"boot", "address", "capacity_bytes"}``; expires with the node's lease.
- ``lives``, set: every ``<life>`` that may have entries here.
- ``block:<key as 32 hex>``, hash: field ``<life>`` → size of the replica in bytes, as decimal digits.
- ``index:<life>``, set: raw 16-byte keys of the blocks that this life has listed.
- ``written:<life>``, string: number of the last change that this life has made to its entries.

Rules:

- A replica is readable if the record ``node:<node>`` exists *and* names the replica's boot. So the entries of a dead
  or restarted node are void at once, before anybody has cleaned up.
- A node lists a block after it became readable and unlists it after it is gone. So a reader may find an entry
  without an object (the node says so when asked), but never an object's entry with other bytes behind it.
- One script writes a life's entries, their index and the number of the change. If another Redis took over with only a
  part of the changes, the life's next change or renewal reveals it, by that number and the size of the index.
  Single lost entries are noticed too: the node checks its entries in turn. Then the node lists everything again.
- Every script looks at the record first. A process that has lost its name to another one writes nothing any more, and a
  life that is back is not purged.
- The index names all entries of a life. Purging a life goes through its index in bounded steps. A node purges its own
  earlier lives when it starts, and the lives of nodes that have had no record for a while.
- A value that does not parse is ignored and counted: Redis is shared, and its content is outside data."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from pinyon.core.block_keys import KEY_BYTES
from pinyon.core.errors import FailedPrecondition, InvalidArgument, Unavailable
from pinyon.runtime.redis_tls import use_tls
from pinyon.store import metadata_scripts as scripts
from pinyon.store.records import Life, NodeRecord, Replica, parse_life, parse_node, parse_replica

if TYPE_CHECKING:
    from pinyon.runtime.tls import Tls

PREFIX = "pinyon:v1:"
BATCH = 512
"""The blocks of one pipeline; they bound one round trip and the memory of its reply."""
MAX_NODES = 1024

T = TypeVar("T")


@dataclass(slots=True)
class _Written:
    """The changes that this process made to the entries of one life, as far as Redis has confirmed them."""

    number: int = 0
    """The number of the last change that was sent."""
    confirmed: int = 0
    entries: int | None = None
    """The size of the index after the last change; None while a change is under way or after it failed."""
    unsure: bool = False
    """True if a change was not confirmed or was lost: the next one begins the numbers anew."""


class StoreMetadata:
    """The layout above as operations. Every call is limited in time, and raises :class:`Unavailable` if Redis is."""

    def __init__(self, url: str, *, timeout_s: float = 1.0, max_connections: int = 8, tls: Tls | None = None) -> None:
        """Connects on first use. Raises :class:`InvalidArgument` if the URL is not one."""
        try:
            pool = BlockingConnectionPool.from_url(
                url,
                max_connections=max_connections,
                timeout=timeout_s,
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
                health_check_interval=15,
                # One retry, as it is no failure if the server has closed a pooled connection meanwhile.
                retry=Retry(ExponentialBackoff(cap=0.2, base=0.02), 1),
                retry_on_error=[RedisConnectionError],
            )
        except ValueError as error:
            raise InvalidArgument(f"not a Redis URL: {error}", field="redis_url") from None
        use_tls(pool, tls)
        pool.connection_kwargs["decode_responses"] = False  # keys are raw bytes, whatever the URL says
        self._redis: Redis = Redis.from_pool(pool)
        self._timeout_s = timeout_s
        every = scripts.ANNOUNCE, scripts.LEAVE, scripts.WRITE, scripts.UNLIST, scripts.FORGET
        self._announce, self._leave, self._write, self._unlist, self._forget = (
            self._redis.register_script(scripts.BOOT + script) for script in every
        )
        self._written: dict[Life, _Written] = {}
        self.malformed = 0
        """The number of values that were ignored because they do not parse."""

    async def close(self) -> None:
        await self._redis.aclose()

    async def _ask(self, answer: Awaitable[Any]) -> Any:
        task = asyncio.current_task()
        cancels = task.cancelling() if task else 0
        try:
            async with asyncio.timeout(self._timeout_s):  # includes the wait for a connection and the second try
                reply = await answer
        except (RedisError, OSError) as error:
            self._pass_on_cancel(task, cancels)
            raise Unavailable(f"Redis: {type(error).__name__}") from error
        self._pass_on_cancel(task, cancels)
        return reply

    @staticmethod
    def _pass_on_cancel(task: asyncio.Task[Any] | None, before: int) -> None:
        """Raises ``CancelledError`` if the task was cancelled meanwhile.

        redis-py sends within ``asyncio.wait_for``, which on Python 3.11 may swallow a cancellation."""
        if task is not None and task.cancelling() > before:
            raise asyncio.CancelledError

    async def _ask_each(self, command: str, arguments: Iterable[tuple[str, ...]]) -> list[Any]:
        """Returns the replies to one command with each of these arguments; the replies to failed ones are errors."""
        async with self._redis.pipeline(transaction=False) as pipe:
            add = getattr(pipe, command)
            for each in arguments:
                add(*each)
            replies: list[Any] = await self._ask(pipe.execute(raise_on_error=False))
        return replies

    # -- nodes

    async def register(self, node: NodeRecord, lease_s: float) -> None:
        """Announces a new life, which takes over from any earlier one of this node id."""
        await self._announced(node, lease_s, take_over=True)

    async def renew(self, node: NodeRecord, lease_s: float) -> bool:
        """Keeps the record alive. Returns False if it or entries have changed: list everything again.

        Raises :class:`FailedPrecondition` if another process has taken the node id."""
        own = self._written.setdefault(node.life, _Written())
        number, confirmed, entries = own.number, own.confirmed, own.entries
        state, written, found = await self._announced(node, lease_s, take_over=False)
        if state == scripts.FENCED:
            raise FailedPrecondition(f"another process runs as store node {node.node_id!r}")
        # A change that was sent meanwhile may or may not be counted in these figures.
        settled = own.number == number and entries is not None
        if state == scripts.OK and written >= confirmed and (not settled or found == entries):
            return True
        own.entries, own.unsure = None, True
        return False

    async def _announced(self, node: NodeRecord, lease_s: float, *, take_over: bool) -> list[int]:
        record = json.dumps({"boot": node.boot_id, "address": node.address, "capacity_bytes": node.capacity_bytes})
        lease_ms = max(1, round(lease_s * 1000))
        arguments: list[str | int] = [str(node.life), node.boot_id, record, lease_ms, int(take_over)]
        reply: list[int] = await self._ask(self._announce(keys=_keys_of(node.life), args=arguments))
        return reply

    async def leave(self, node: NodeRecord) -> None:
        """Removes the record (if it is ours): from now on, nothing of this life is readable."""
        await self._ask(self._leave(keys=_keys_of(node.life)[:1], args=[node.boot_id]))
        self._written.pop(node.life, None)

    async def lives(self) -> set[Life]:
        """Returns all lives that may have entries, including dead ones."""
        raw = await self._ask(self._redis.smembers(f"{PREFIX}lives"))
        return set(self._parsed(parse_life(member) for member in raw))

    async def nodes(self) -> list[NodeRecord]:
        """Returns the live nodes, by id; at most ``MAX_NODES``."""
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
        """Adds ``(key, size in bytes)`` blocks to the list of a life of this process. One call at a time for a life.

        When this or :meth:`discard` raises, the entries are not what they should be: list everything again. Raises
        Unavailable if Redis cannot be asked, or has lost earlier changes or entries, and FailedPrecondition if another
        process has taken the node id."""
        for start in range(0, len(blocks), BATCH):
            batch = blocks[start : start + BATCH]
            await self._change(life, [], batch)

    async def discard(self, life: Life, keys: Sequence[bytes]) -> None:
        """Removes blocks from the list. Raises like :meth:`add`."""
        for start in range(0, len(keys), BATCH):
            await self._change(life, keys[start : start + BATCH], [])

    async def restart(self, life: Life) -> None:
        """Restarts the numbers of the changes, whatever Redis had; called before everything is listed again."""
        await self._change(life, [], [])

    async def _change(self, life: Life, removed: Sequence[bytes], listed: Sequence[tuple[bytes, int]]) -> None:
        own = self._written.setdefault(life, _Written())
        own.number += 1
        number, restart, before = own.number, own.unsure, own.entries
        own.entries, own.unsure = None, True  # until it is confirmed
        keys = _keys_of(life) + [_block(key) for key in removed] + [_block(key) for key, _ in listed]
        arguments: list[str | bytes | int] = [str(life), life.boot_id, number, int(restart), len(removed), *removed]
        for key, size in listed:
            arguments += (key, size)
        state, written, entries, foreign = await self._ask(self._write(keys=keys, args=arguments))
        if state == scripts.FENCED:
            raise FailedPrecondition(f"another process runs as store node {life.node_id!r}")
        if state == scripts.LOST:
            own.number = max(own.number, written)
            raise Unavailable("Redis has lost changes")
        self.malformed += foreign
        own.confirmed = number
        if before is not None and entries < before - len(removed):
            raise Unavailable("Redis has lost entries")
        own.entries, own.unsure = entries, False

    async def listed(self, life: Life) -> set[bytes]:
        """Returns the keys in this life's index."""
        index = f"{PREFIX}index:{life}"
        await self._drop_foreign(index)
        found: set[bytes] = set()
        cursor = -1
        while cursor:
            cursor, part = await self._ask(self._redis.sscan(index, max(0, cursor), count=2 * BATCH))
            found.update(part)
        return found

    async def missing(self, life: Life, keys: Sequence[bytes]) -> list[bytes]:
        """Returns the blocks among these that have no entry of this life."""
        replies = await self._ask_each("hexists", [(_block(key), str(life)) for key in keys])
        for reply in replies:
            if isinstance(reply, RedisError) and "WRONGTYPE" not in str(reply):
                raise Unavailable(f"Redis: {reply}") from reply
        return [key for key, there in zip(keys, replies, strict=True) if not there]

    async def locate(self, keys: Sequence[bytes], nodes: Iterable[NodeRecord] | None = None) -> list[list[Replica]]:
        """Returns the replicas of each key on live nodes (``nodes``, if the caller has just asked for them)."""
        live = {str(node.life): node for node in (await self.nodes() if nodes is None else nodes)}
        if not live:
            return [[] for _ in keys]
        located: list[list[Replica]] = []
        for start in range(0, len(keys), BATCH):
            batch = [(_block(key),) for key in keys[start : start + BATCH]]
            located += [self._replicas(reply, live) for reply in await self._ask_each("hgetall", batch)]
        return located

    def _replicas(self, reply: Any, live: dict[str, NodeRecord]) -> list[Replica]:
        if not isinstance(reply, dict):  # an error: the key holds another type
            self.malformed += 1
            return []
        parsed = self._parsed(parse_replica(field, value) for field, value in reply.items())
        return [Replica(live[str(life)], size) for life, size in sorted(parsed) if str(life) in live]

    async def purge(self, life: Life, max_blocks: int) -> int:
        """Removes up to ``max_blocks`` entries of a life that is over, and returns how many were removed.

        If fewer were removed, nothing is left of the life, or it is back."""
        node, lives, index, written = _keys_of(life)
        await self._drop_foreign(index)
        purged = 0
        while purged < max_blocks:
            found = await self._ask(self._redis.srandmember(index, min(BATCH, max_blocks - purged)))
            if not found:
                await self._ask(self._forget(keys=[node, lives, index, written], args=[str(life), life.boot_id]))
                break
            self.malformed += sum(len(key) != KEY_BYTES for key in found)
            keys = [node, index, *map(_block, found)]
            if await self._ask(self._unlist(keys=keys, args=[str(life), life.boot_id, *found])) == scripts.FENCED:
                break
            purged += len(found)
        return purged

    async def _drop_foreign(self, index: str) -> None:
        """Deletes the key of an index if a stranger has put a value of another type there."""
        if await self._ask(self._redis.type(index)) not in (b"set", b"none"):
            self.malformed += 1
            await self._ask(self._redis.delete(index))

    # -- helpers

    def _parsed(self, values: Iterable[T | None]) -> list[T]:
        """Returns the values that parsed, and counts the others."""
        found = []
        for value in values:
            if value is None:
                self.malformed += 1
            else:
                found.append(value)
        return found


def _keys_of(life: Life) -> list[str]:
    """Returns the keys of a life that scripts need: node, lives, index, written."""
    names = (f"node:{life.node_id}", "lives", f"index:{life}", f"written:{life}")
    return [PREFIX + name for name in names]


def _block(key: bytes) -> str:
    return f"{PREFIX}block:{key.hex()}"
