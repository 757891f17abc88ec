"""The way out of the pool: a node that is to leave copies what has no other copy to the nodes that stay."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from pinyon.core.clock import Clock
from pinyon.core.errors import FailedPrecondition, PinyonError
from pinyon.runtime.logging import get_logger
from pinyon.store.kv_object import KvObject
from pinyon.store.listing import anchors, hottest_first
from pinyon.store.metadata import StoreMetadata
from pinyon.store.records import NodeRecord
from pinyon.store.runs import rank, weights_of
from services.kvstore.copier import Copier
from services.kvstore.node import StoreNode

BATCH = 512
"""The objects that are copied at once."""
LOOK_KEYS = 8192
"""The objects that are looked up at once."""
TRIES = 2
"""The number of nodes that are tried for an object."""
PUTS_S = 5.0
"""The seconds for which open puts are waited for. What they store is copied too; later ones are lost with the node."""
LISTED_S = 2.0
"""The seconds that the last copies may take until readers find them. One that is evicted again never is."""
LOOK_S = 0.02

_log = get_logger("drain")


@dataclass(slots=True)
class Progress:
    copied: int = 0
    copied_bytes: int = 0
    seen: int = 0
    objects: int = 0
    lost: int = 0
    """The objects that no node took, or that were too cold for the room that there is."""


class Drain:
    """The drain of one node; at most one at a time."""

    def __init__(
        self, node: StoreNode, copier: Copier, metadata: StoreMetadata, *, clock: Clock = time.monotonic
    ) -> None:
        self._node, self._copier, self._metadata, self._clock = node, copier, metadata, clock
        self.announce: Callable[[], Awaitable[None]] | None = None
        """The function that tells the directory that the node is to leave; set when the node is listed there."""

    async def run(self) -> AsyncGenerator[Progress, None]:
        """Drains the node, and yields how far it is after each batch.

        After the last one, the node takes no puts any more. If this ends before, it takes puts again. Raises
        :class:`FailedPrecondition` if another drain is under way or no other node is there, and
        :class:`Unavailable` if Redis is."""
        if self.announce is None:
            raise FailedPrecondition("the node is starting")
        if self._node.leaving:
            raise FailedPrecondition("the node is being drained, or was")
        self._node.leaving = True
        done = False
        progress = Progress()
        try:
            await self.announce()
            if not await self._others():
                raise FailedPrecondition("there is no other store node to copy to")
            await self._node.wait_puts(PUTS_S)
            order = await asyncio.to_thread(hottest_first, *self._node.table.snapshot())  # there may be a million
            order.sort(key=lambda each: each.key not in self._node.table.pinned)
            progress.objects = len(order)
            lone = await self._lone(order)
            progress.seen = len(order) - len(lone)
            content = sum([each.size for each in lone])
            room = content * _share(content, await self._others())
            newest: dict[str, list[bytes]] = {}
            for start in range(0, len(lone), BATCH):
                part = lone[start : start + BATCH]
                fitting = []
                for each in part:
                    room -= each.size
                    if room >= 0:
                        fitting.append(each.key)
                await self._batch(fitting, progress, newest)
                progress.lost += len(part) - len(fitting)
                progress.seen += len(part)
                yield progress
            await self._listed([key for keys in newest.values() for key in keys])
            done = True
            yield progress
        finally:
            self._node.leaving = done
            if not done:
                with suppress(PinyonError):  # else it is told at the next renewal
                    await self.announce()
        _log.info("drained: %d objects copied, %d lost", progress.copied, progress.lost)

    async def _others(self) -> list[NodeRecord]:
        nodes = await self._metadata.nodes()
        return [node for node in nodes if node.node_id != self._node.node_id and not node.room.leaving]

    async def _lone(self, objects: Sequence[KvObject]) -> list[KvObject]:
        """Returns those of the objects that no other node has."""
        lone: list[KvObject] = []
        for start in range(0, len(objects), LOOK_KEYS):
            part = objects[start : start + LOOK_KEYS]
            located = await self._metadata.locate([each.key for each in part], await self._others())
            lone += [each for each, replicas in zip(part, located, strict=True) if not replicas]
        return lone

    async def _batch(self, lone: Sequence[bytes], progress: Progress, newest: dict[str, list[bytes]]) -> None:
        """Copies the keys; notes the last ones that each node got."""
        others = await self._others()
        weights = weights_of(others)
        node_of = {node.node_id: node for node in others}
        for choice in range(min(TRIES, len(others))):
            at: dict[str, list[bytes]] = {}
            for key, anchor in zip(lone, anchors(lone, self._node.table.in_memory), strict=True):
                at.setdefault(rank(anchor, weights)[choice], []).append(key)
            copied, before = set[bytes](), self._copier.copied_bytes
            for node_id, part in at.items():
                try:
                    newest[node_id] = await self._copier.copy(part, node_of[node_id])
                    copied.update(newest[node_id])
                except PinyonError as error:
                    _log.info("store node %s takes no copies: %s", node_id, error.message)
            progress.copied += len(copied)
            progress.copied_bytes += self._copier.copied_bytes - before
            lone = [key for key in lone if key not in copied and key in self._node.table]
        progress.lost += len(lone)

    async def _listed(self, keys: Sequence[bytes]) -> None:
        """Waits until the others list the copies: the node may be stopped as soon as the drain is over.

        A node lists its objects in the order in which they came."""
        others, deadline = await self._others(), self._clock() + LISTED_S
        while not all(await self._metadata.locate(keys, others)) and self._clock() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)


def _share(content_bytes: int, others: Sequence[NodeRecord]) -> float:
    """Returns the share of so much content that fits into the memory of the ``others``, if all of it is as hot."""
    capacity = sum([node.capacity_bytes for node in others])
    used = capacity - sum([node.room.free_bytes or 0 for node in others])
    return min(1.0, capacity / max(1, used + content_bytes))
