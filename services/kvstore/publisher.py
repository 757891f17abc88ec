"""The upkeep of a node's entries in Redis: it renews the node's record, lists blocks, and forgets dead nodes."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from pinyon.core.avoidance import Avoidance
from pinyon.core.clock import Clock
from pinyon.core.errors import FailedPrecondition, PinyonError, Unavailable
from pinyon.runtime.logging import get_logger
from pinyon.runtime.tasks import ended
from pinyon.store.metadata import BATCH, StoreMetadata
from pinyon.store.records import NodeRecord, entry_of
from services.kvstore.node import StoreNode

GAP_S = 0.02
"""Changes within this time, in seconds, are sent together."""
MAX_PAUSE_S = 2.0
CLEAN_PERIOD_S = 5.0
DEAD_GRACE_S = 30.0
"""The seconds without a record after which a node counts as gone; before that, Redis may only have been away."""
LEAVE_S = 3.0
REGISTER_S = 10.0
REGISTER_PAUSE_S = 0.25

_log = get_logger("metadata")


class MetadataPublisher:
    """A publisher of metadata: ``register`` → ``start`` → ``close``.

    Redis may be away at any time after ``register``; afterwards everything is listed anew."""

    def __init__(
        self,
        node: StoreNode,
        record: NodeRecord,
        metadata: StoreMetadata,
        lease_s: float,
        *,
        clock: Clock = time.monotonic,
        lost_name: asyncio.Event | None = None,
    ) -> None:
        """Takes the event ``lost_name``, which is set when another process has taken this node's id."""
        self._node = node
        self._record = record
        self.metadata = metadata
        self._lease_s = lease_s
        self._clock = clock
        self._lost_name = lost_name or asyncio.Event()
        self._changes = node.table.listen()
        self._listed: set[bytes] = set()  # as confirmed by Redis
        self._tell_all = bool(node.table.keys())  # found on the disk
        self._wake = asyncio.Event()
        self._dead_since: dict[str, float] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self.failures = 0
        """The number of times that Redis could not be told a change."""
        self.losses = 0
        """The number of times that Redis was found to have lost entries or the record."""
        self.forgotten = 0
        """The number of dead nodes whose entries were removed."""
        node.on_change(self._wake.set)

    @property
    def listed(self) -> int:
        """The number of blocks listed in Redis, as it has confirmed."""
        return len(self._listed)

    async def register(self) -> None:
        """Announces this life, and tries again for a while, because Redis may just be starting, too.

        Raises :class:`Unavailable` if Redis cannot be reached."""
        give_up_s = self._clock() + REGISTER_S
        waits = False
        while True:
            try:
                return await self.metadata.register(self._now(), self._lease_s)
            except Unavailable as error:
                if self._clock() >= give_up_s:
                    raise Unavailable(
                        f"no Redis answers within {REGISTER_S:g} s ({error.message}): is --redis-url right?"
                    ) from error
                if not waits:
                    _log.warning("waiting for Redis, %g s at most (%s)", REGISTER_S, error.message)
                waits = True
                await asyncio.sleep(REGISTER_PAUSE_S)

    def _now(self) -> NodeRecord:
        return replace(self._record, room=self._node.room())

    async def renew(self) -> None:
        """Renews the record with the node's present room. Raises as :meth:`StoreMetadata.renew` does."""
        if not await self.metadata.renew(self._now(), self._lease_s):
            self._lost("the node's record or entries were gone from Redis")

    def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._publish(), name="metadata-publish"),
            asyncio.create_task(self._keep_alive(), name="metadata-lease"),
            asyncio.create_task(self._clean(), name="metadata-clean"),
        ]

    async def close(self) -> None:
        """Signs off: from now on, nobody finds anything of this node. Limited in time."""
        await ended(*self._tasks)
        try:
            async with asyncio.timeout(LEAVE_S):
                await self.metadata.leave(self._record)
        except (PinyonError, TimeoutError):
            _log.info("could not sign off from Redis; the node's lease ends by its time")

    # -- the blocks

    async def _publish(self) -> None:
        pauses = Avoidance(first_s=2 * GAP_S, max_s=MAX_PAUSE_S, max_peers=1)
        while True:
            if not self._tell_all:
                await self._wake.wait()
            self._wake.clear()
            try:
                await self.publish()
                pauses.succeeded("redis")
            except Exception as error:
                pauses.failed("redis", self._clock())
                _report("block metadata is late", error)
            await asyncio.sleep(max(GAP_S, pauses.left_s("redis", self._clock())))

    async def publish(self) -> None:
        """Brings Redis up to date. After a failure the next call lists everything."""
        table, life = self._node.table, self._record.life
        stored, removed = self._changes.drain(changed=True)
        tell_all, self._tell_all = self._tell_all, False
        try:
            if tell_all:
                self._listed.clear()
                await self.metadata.restart(life)
                listed = await self.metadata.listed(life.node_id)
                self._changes.drain()
                stored = table.keys()
                removed = list(listed.difference(stored))
            self._listed.difference_update(removed)
            for start in range(0, max(len(stored), len(removed)), BATCH):
                part = slice(start, start + BATCH)
                entries = ((key, table.entry(key)) for key in stored[part])
                blocks = [(key, entry_of(*entry)) for key, entry in entries if entry is not None]
                await self.metadata.change(life, removed[part], blocks)
                self._listed.update(key for key, _ in blocks)
        except Exception:
            self.failures += 1
            self._tell_all = True
            raise

    # -- the record

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 3)
            try:
                await self.renew()
            except FailedPrecondition as error:
                _log.error("%s; this one stops", error.message)
                self._lost_name.set()
                return
            except Exception as error:
                self.failures += 1
                _report("the node's lease was not renewed", error)

    def _lost(self, what: str) -> None:
        self.losses += 1
        _log.warning("%s; listing all blocks again", what)
        self._tell_all = True
        self._wake.set()

    # -- the dead

    async def _clean(self) -> None:
        while True:
            try:
                await self.clean()
            except Exception as error:
                self.failures += 1
                _report("cleaning up is late", error)
            await asyncio.sleep(CLEAN_PERIOD_S)

    async def clean(self) -> None:
        """Tells the node of the others' capacity, and forgets those that have been gone for a while."""
        now, own = self._clock(), self._record.node_id
        others = {node.node_id: node.capacity_bytes for node in await self.metadata.nodes() if node.node_id != own}
        await self._node.share_pool(sum(others.values()))
        gone = set(await self.metadata.names()) - {*others, own}
        self._dead_since = {name: self._dead_since.get(name, now) for name in gone}
        for name, since in self._dead_since.items():
            if now - since >= DEAD_GRACE_S:
                self.forgotten += await self.metadata.forget(name)


def _report(what: str, error: Exception) -> None:
    """Logs an error. An unexpected one is a defect; still, the duty goes on, or the node would be lost to all."""
    if isinstance(error, PinyonError):
        _log.info("%s: %s", what, error.message)
    else:
        _log.error("%s", what, exc_info=error)
