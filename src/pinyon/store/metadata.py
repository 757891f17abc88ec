"""The block metadata in Redis. Only this module defines its layout; see docs/design/store.md.

All keys begin with ``pinyon:v2:``. Another version of the layout gets another prefix and shares nothing. All keys of a
store node have its instance id as their hash tag, so that they lie in one slot of a Redis Cluster:

- ``nodes``, set: the ids of the nodes that may have something here.
- ``{<node>}:record``, string: JSON ``{"boot", "address", "capacity_bytes", "zone", "free_bytes", "worth", "leaving"}``,
  the last three as of the last renewal; expires with the node's lease.
- ``{<node>}:life``, hash: ``boot``, the 32 hex digits of the process life that all of this belongs to, and ``number``,
  the number of its last change.
- ``{<node>}:blocks``, hash: raw 16-byte key of a block → its entry. An entry is a letter for the tier (``m`` memory,
  ``d`` disk), the copy's size in bytes as 11 hex digits, and the tenant's name, if it has one.

A block has as many copies as nodes list it. An entry takes 80 to 110 bytes of Redis, and the tenant's name.

Rules:

- A copy is readable if the node's record exists. A node has one table; a new life begins with an empty one. So the
  entries of a dead or restarted node are void at once, and gone with one command.
- A node lists a block after it became readable and unlists it after it is gone. So a reader may find an entry
  without an object (the node says so when asked), but never an object's entry with other bytes behind it.
- One script writes the entries and the number of the change. If another Redis took over with only a part of the
  changes, the next change or renewal reveals it, by that number and the number of entries. Then the node lists
  everything again.
- Every script looks at the life first. A process that has lost its name to another one writes nothing any more.
- Nodes that have had no record for a while are forgotten by the others.
- A value that does not parse is ignored and counted: Redis is shared, and its content is outside data."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from redis.exceptions import RedisError

from pinyon.core.block_keys import KEY_BYTES
from pinyon.core.errors import FailedPrecondition, Unavailable
from pinyon.runtime.redis_client import RedisClient, close_redis, connect_redis
from pinyon.store import metadata_scripts as scripts
from pinyon.store.records import ENTRY_BYTES, Life, NodeRecord, Replica, is_node_id, parse_entry, parse_node

if TYPE_CHECKING:
    from pinyon.runtime.tls import Tls

PREFIX = "pinyon:v2:"
BATCH = 512
"""The blocks of one script; they bound the time for which it keeps Redis to itself."""
MAX_NODES = 1024

_NODES = f"{PREFIX}nodes"
_NOTHING = b" " * ENTRY_BYTES


@dataclass(slots=True)
class _Written:
    """The changes that this process made to the entries of one life, as far as Redis has confirmed them."""

    number: int = 0
    """The number of the last change that was sent."""
    confirmed: int = 0
    entries: int | None = None
    """The number of entries after the last change; None while a change is under way or after it failed."""
    unsure: bool = False
    """True if a change was not confirmed or was lost: the next one begins the numbers anew."""


class StoreMetadata:
    """The layout above as operations. Every call is limited in time, and raises :class:`Unavailable` if Redis is."""

    def __init__(self, url: str, *, timeout_s: float = 1.0, tls: Tls | None = None) -> None:
        """Connects on first use. Raises :class:`InvalidArgument` if the URL is not one."""
        self._redis: RedisClient = connect_redis(url, timeout_s, tls=tls)
        self._timeout_s = timeout_s
        self._written: dict[Life, _Written] = {}
        self.malformed = 0
        """The number of values that were ignored because they do not parse."""

    async def close(self) -> None:
        await close_redis(self._redis)

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
        arguments = node.boot_id, node.to_json(), max(1, round(lease_s * 1000)), int(take_over)
        named, reply = await self._ask_each(
            ("SADD", _NODES, node.node_id), _script(scripts.ANNOUNCE, _keys_of(node.node_id), *arguments)
        )
        if isinstance(named, RedisError) and "WRONGTYPE" in str(named):
            await self._ask(self._redis.execute_command("DEL", _NODES))
            named = await self._ask(self._redis.execute_command("SADD", _NODES, node.node_id))
        found: list[int] = _no_error(reply)
        _no_error(named)
        return found

    async def leave(self, node: NodeRecord) -> None:
        """Removes the record and all entries, if they are of this life: nothing of it is readable any more."""
        left = await self._run(scripts.LEAVE, _keys_of(node.node_id), node.boot_id)
        if left == scripts.OK:
            await self._ask(self._redis.execute_command("SREM", _NODES, node.node_id))
        self._written.pop(node.life, None)

    async def names(self) -> list[str]:
        """Returns the ids of all nodes that may have something here, sorted; at most ``MAX_NODES``."""
        (raw,) = await self._ask_each(("SMEMBERS", _NODES))
        if isinstance(raw, RedisError) and "WRONGTYPE" in str(raw):
            self.malformed += 1
            return []
        names = _no_error(raw)
        good = [each.decode() for each in names if is_node_id(each)]
        self.malformed += len(names) - len(good)
        return sorted(good)[:MAX_NODES]

    async def nodes(self) -> list[NodeRecord]:
        """Returns the live nodes, by id."""
        names = await self.names()
        if not names:
            return []
        raws = await self._ask_each(*(("GET", _keys_of(name)[0]) for name in names))
        found = []
        for name, raw in zip(names, raws, strict=True):
            if raw is None:
                continue
            node = None if isinstance(raw, RedisError) and "WRONGTYPE" in str(raw) else parse_node(name, _no_error(raw))
            if node is None:
                self.malformed += 1
            else:
                found.append(node)
        return found

    async def forget(self, node_id: str) -> bool:
        """Removes all entries of a node. Returns False, and does nothing, if the node has a record."""
        if await self._run(scripts.FORGET, _keys_of(node_id)) == scripts.FENCED:
            return False
        await self._ask(self._redis.execute_command("SREM", _NODES, node_id))
        return True

    # -- blocks

    async def change(self, life: Life, gone: Sequence[bytes], come: Sequence[tuple[bytes, bytes]]) -> None:
        """Removes the entries of these keys, then lists ``(key, entry)``, for a life of this process.

        One call at a time for a life. When this raises, the entries are not what they should be: list everything again.
        Raises Unavailable if Redis cannot be asked, or has lost earlier changes or entries, and FailedPrecondition if
        another process has taken the node id."""
        for start in range(0, max(len(gone), len(come)), BATCH):
            part = slice(start, start + BATCH)
            await self._change(life, gone[part], come[part])

    async def restart(self, life: Life) -> None:
        """Restarts the numbers of the changes, whatever Redis had; called before everything is listed again."""
        await self._change(life, [], [])

    async def _change(self, life: Life, gone: Sequence[bytes], come: Sequence[tuple[bytes, bytes]]) -> None:
        own = self._written.setdefault(life, _Written())
        own.number += 1
        number, restart, before = own.number, own.unsure, own.entries
        own.entries, own.unsure = None, True  # until it is confirmed
        arguments = [each for pair in come for each in pair]
        state, written, entries = await self._run(
            scripts.WRITE, _keys_of(life.node_id)[1:], life.boot_id, number, int(restart), b"".join(gone), *arguments
        )
        if state == scripts.FENCED:
            raise FailedPrecondition(f"another process runs as store node {life.node_id!r}")
        if state == scripts.LOST:
            own.number = max(own.number, written)
            raise Unavailable("Redis has lost changes")
        own.confirmed = number
        if before is not None and entries < before - len(gone):
            raise Unavailable("Redis has lost entries")
        own.entries, own.unsure = entries, False

    async def listed(self, node_id: str) -> set[bytes]:
        """Returns the keys that this node's table lists."""
        found: set[bytes] = set()
        cursor = 0
        while True:
            cursor, part = await self._ask(self._redis.hscan(_keys_of(node_id)[2], cursor, count=BATCH))
            found.update(key for key in part if len(key) == KEY_BYTES)
            if not cursor:
                return found

    async def locate(self, keys: Sequence[bytes], nodes: Iterable[NodeRecord] | None = None) -> list[list[Replica]]:
        """Returns the copies of each key on live nodes (``nodes``, if the caller has just asked for them).

        One round trip to each Redis, however many keys there are."""
        live = await self.nodes() if nodes is None else list(nodes)
        located: list[list[Replica]] = [[] for _ in keys]
        parts = [(start, node) for start in range(0, len(keys), BATCH) for node in live]
        packed = {start: b"".join(keys[start : start + BATCH]) for start, _ in parts}
        asked = [_script(scripts.LOCATE, _keys_of(node.node_id)[2:], packed[start]) for start, node in parts]
        if len(asked) == 1:  # redis-py's pipelines take 80 µs more
            replies = [await self._ask(self._redis.execute_command(*asked[0]))]
        else:
            replies = await self._ask_each(*asked) if asked else []
        for (start, node), reply in zip(parts, replies, strict=True):
            self._note_entries(node, _no_error(reply), located, start)
        return located

    def _note_entries(self, node: NodeRecord, packed: bytes, located: list[list[Replica]], start: int) -> None:
        """Adds a node's copies to ``located``, from ``start`` on."""
        known: dict[bytes, Replica | None] = {_NOTHING: None}  # most entries of a prompt are alike
        for at in range(0, len(packed), ENTRY_BYTES):
            entry = packed[at : at + ENTRY_BYTES]
            if entry not in known:
                parsed = parse_entry(entry)
                self.malformed += parsed is None
                known[entry] = None if parsed is None else Replica(node, *parsed)
            replica = known[entry]
            if replica is not None:
                located[start + at // ENTRY_BYTES].append(replica)

    # -- asking

    async def _run(self, script: str, keys: Sequence[str], *arguments: str | bytes | int) -> Any:
        return await self._ask(self._redis.execute_command(*_script(script, keys, *arguments)))

    async def _ask_each(self, *commands: tuple[Any, ...]) -> list[Any]:
        """Returns the replies to these commands, sent together; the replies to failed ones are errors."""
        async with self._redis.pipeline(transaction=False) as pipe:
            for command in commands:
                pipe.execute_command(*command)
            replies: list[Any] = await self._ask(pipe.execute(raise_on_error=False))
        return replies

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


def _no_error(reply: Any) -> Any:
    """Returns a reply of several. Raises :class:`Unavailable` if it is an error."""
    if isinstance(reply, Exception):
        raise Unavailable(f"Redis: {type(reply).__name__}") from reply
    return reply


def _keys_of(node_id: str) -> list[str]:
    """Returns the keys of a node: record, life, blocks."""
    return [f"{PREFIX}{{{node_id}}}:{name}" for name in ("record", "life", "blocks")]


def _script(script: str, keys: Sequence[str], *arguments: str | bytes | int) -> tuple[Any, ...]:
    return ("EVAL", script, len(keys), *keys, *arguments)
