"""The metadata's answers. After a failure, Redis is not asked for a pause that grows with each failure.

After the pause, and while a question takes long, one question at a time finds out whether Redis answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from pinyon.core.avoidance import Avoidance
from pinyon.core.block_keys import BlockKey
from pinyon.core.clock import Clock
from pinyon.core.errors import Unavailable
from pinyon.store.metadata import StoreMetadata
from pinyon.store.records import NodeRecord, Replica

NODES_FRESH_S = 0.5
"""The seconds for which the list of nodes is believed; a node's lease is a multiple of this."""
FIRST_PAUSE_S = 0.25
MAX_PAUSE_S = 2.0
"""The longest pause: there is only one Redis, so its return should be noticed soon."""
DOUBT_S = 0.5
"""The seconds after which an unanswered question puts Redis in doubt, so that no other question waits as long.

It is well above the delay of a busy machine's event loop."""

T = TypeVar("T")


class BlockDirectory:
    """A front for the metadata; every question raises :class:`Unavailable` if Redis cannot be asked.

    It raises at once while the failure is fresh, or while another question finds out whether Redis answers again."""

    def __init__(self, metadata: StoreMetadata, clock: Clock) -> None:
        self._metadata = metadata
        self._clock = clock
        self._pauses = Avoidance(first_s=FIRST_PAUSE_S, max_s=MAX_PAUSE_S, max_peers=1)
        self._out: list[float] = []
        """The times at which the still unanswered questions were asked, in order."""
        self._nodes: list[NodeRecord] = []
        self._nodes_until_s = float("-inf")
        self._nodes_asked_s = float("-inf")
        self.losses = 0
        """The number of node lists that lacked nodes listed before; all that these held is lost."""

    async def nodes(self) -> list[NodeRecord]:
        """Returns the live nodes, by id; an answer is kept for half a second."""
        return await self._ask(self._fresh_nodes, None)

    async def locate(self, keys: Sequence[BlockKey], timeout_s: float) -> tuple[list[NodeRecord], list[list[Replica]]]:
        """Returns the live nodes, and for each key its replicas on them."""

        async def ask() -> tuple[list[NodeRecord], list[list[Replica]]]:
            nodes = await self._fresh_nodes()
            return nodes, await self._metadata.locate(keys, nodes)

        return await self._ask(ask, timeout_s)

    async def _fresh_nodes(self) -> list[NodeRecord]:
        asked_s = self._clock()
        if asked_s >= self._nodes_until_s:
            nodes = await self._metadata.nodes()
            # Several questions may run at a time, so that none waits for another's failure. A late answer to an older
            # question would look like a loss.
            if asked_s >= self._nodes_asked_s:
                self.losses += not {node.life for node in self._nodes} <= {node.life for node in nodes}
                self._nodes, self._nodes_asked_s = nodes, asked_s
                self._nodes_until_s = self._clock() + NODES_FRESH_S
        return self._nodes

    async def _ask(self, ask: Callable[[], Awaitable[T]], timeout_s: float | None) -> T:
        asked_s = self._clock()
        if self._pauses.avoids("redis", asked_s):
            raise Unavailable("Redis failed just now and is not asked for a moment")
        if self._out and ("redis" in self._pauses or asked_s - self._out[0] > DOUBT_S):
            raise Unavailable("Redis may not answer: one question at a time finds out")
        self._out.append(asked_s)
        try:
            async with asyncio.timeout(timeout_s):
                answer = await ask()
        except Unavailable:
            self._pauses.failed("redis", self._clock())
            raise
        except TimeoutError:  # the caller's timeout: a very short timeout says nothing about Redis
            if self._clock() - asked_s > DOUBT_S:
                self._pauses.failed("redis", self._clock())
            raise Unavailable("Redis: no answer in time") from None
        finally:
            self._out.remove(asked_s)
        self._pauses.succeeded("redis", asked_s)
        return answer
