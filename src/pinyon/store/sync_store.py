"""The KV store for threads without an event loop, such as an inference engine's."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from itertools import takewhile
from typing import Any

from pinyon.core.avoidance import Avoidance
from pinyon.core.block_keys import BlockKey
from pinyon.core.clock import Clock
from pinyon.core.errors import PinyonError, Unavailable
from pinyon.core.orders import FetchSpan
from pinyon.core.request import UNKNOWN_CLASS, RequestClass
from pinyon.runtime.logging import get_logger
from pinyon.runtime.loop_thread import LoopThread
from pinyon.store.client import CopiesChanged, StoreClient
from pinyon.store.kv_memory import KvMemory, Pieces
from pinyon.store.reader import BlockReader, ReadTerms
from pinyon.store.records import Replica
from pinyon.store.spans import find_spans, read_span
from pinyon.store.writer import PutOutcome

_log = get_logger("store")


class SyncStore:
    """The face of a :class:`StoreClient` and a :class:`BlockReader` that live on the loop of ``thread``.

    Every method returns at once with a future. Futures of reads and puts end without an error, and always in time; the
    memory that they name is not touched any more then. Without a ``client`` there is no store: only peers are read."""

    def __init__(
        self,
        thread: LoopThread,
        client: StoreClient | None,
        reader: BlockReader | None,
        *,
        clock: Clock = time.monotonic,
    ) -> None:
        self._thread = thread
        self._client, self._reader = client, reader
        self._clock = clock
        self._avoidance = Avoidance(max_s=10.0)
        """Sources whose blocks did not come lately."""

    def failed_sources(self) -> frozenset[str]:
        """Returns the addresses that are left alone now."""
        return frozenset(self._avoidance.avoided(self._clock()))

    def look(self, keys: Sequence[BlockKey], object_bytes: int, timeout_s: float) -> Future[tuple[FetchSpan, ...]]:
        """Asks where the store has the first keys, without a gap. A store that cannot be asked has nothing."""
        return self._thread.submit(self._look(keys, object_bytes, timeout_s))

    def read(
        self,
        spans: Sequence[FetchSpan],
        keys: Sequence[BlockKey],
        places: Sequence[Pieces],
        object_bytes: int,
        timeout_s: float,
        terms: ReadTerms,
    ) -> Future[list[int]]:
        """Reads block ``keys[i]`` into ``places[i]``; ``terms`` name the place of the first one in its prompt.

        Returns how many blocks of each span arrived. What did not is asked for once more, from other copies in the
        store. After a span that still is not whole, no other is read."""
        return self._thread.submit(self._read(spans, keys, places, object_bytes, timeout_s, terms))

    def put(
        self,
        objects: Sequence[tuple[BlockKey, Pieces]],
        object_bytes: int,
        timeout_s: float,
        request_class: RequestClass = UNKNOWN_CLASS,
        places: Sequence[int] | None = None,
        **options: Any,
    ) -> Future[tuple[PutOutcome, ...]]:
        """Stores the objects that the store lacks: see :meth:`StoreClient.put`, also for the further options."""
        return self._thread.submit(self._put(objects, object_bytes, timeout_s, request_class, places, options))

    # -- calls of the client itself; their futures have its errors

    def register(self, buffer: object, object_bytes: int) -> KvMemory:
        return self._asked().register(buffer, object_bytes)

    def get(
        self, objects: Sequence[tuple[BlockKey, Pieces]], object_bytes: int, timeout_s: float, **options: Any
    ) -> Future[list[bool]]:
        """Reads objects from wherever they are: see :meth:`StoreClient.get`."""
        return self._thread.submit(self._asked().get(objects, object_bytes, timeout_s, **options))

    def exists(self, keys: Sequence[BlockKey], object_bytes: int, timeout_s: float) -> Future[list[bool]]:
        return self._thread.submit(self._asked().exists(keys, object_bytes, timeout_s))

    def locate(self, keys: Sequence[BlockKey], timeout_s: float) -> Future[list[list[Replica]]]:
        return self._thread.submit(self._asked().locate(keys, timeout_s))

    def change_replica(self, keys: Sequence[BlockKey], copies: int, timeout_s: float) -> Future[CopiesChanged]:
        return self._thread.submit(self._asked().change_replica(keys, copies, timeout_s))

    def remove(self, keys: Sequence[BlockKey], timeout_s: float) -> Future[int]:
        return self._thread.submit(self._asked().remove(keys, timeout_s))

    def _asked(self) -> StoreClient:
        if self._client is None:
            raise Unavailable("there is no store")
        return self._client

    # -- on the loop

    async def _look(self, keys: Sequence[BlockKey], object_bytes: int, timeout_s: float) -> tuple[FetchSpan, ...]:
        if self._client is None or not keys:
            return ()
        found = await find_spans(self._client, keys, object_bytes, timeout_s)
        now_s = self._clock()
        return tuple(takewhile(lambda span: not self._avoidance.avoids(span.address, now_s), found))

    async def _read(
        self,
        spans: Sequence[FetchSpan],
        keys: Sequence[BlockKey],
        places: Sequence[Pieces],
        object_bytes: int,
        timeout_s: float,
        terms: ReadTerms,
        *,
        first_try: bool = True,
    ) -> list[int]:
        arrived: list[int] = []
        until_s = self._clock() + timeout_s
        base = spans[0].first if spans else 0
        for span in spans:
            at, end = span.first - base, span.end - base
            left_s, count = until_s - self._clock(), 0
            if self._reader is not None and left_s > 0 and not self._avoidance.avoids(span.address, self._clock()):
                count = await read_span(
                    *(self._reader, self._avoidance, self._clock, span, keys[at:end], places[at:end], object_bytes),
                    *(left_s, timeout_s, terms),
                )
            left_s = until_s - self._clock()
            if first_try and at + count < end and left_s > 0 and self._client is not None:
                without, rest = {each.address for each in spans}, slice(at + count, end)
                others = await find_spans(self._client, keys[rest], object_bytes, left_s, without=without)
                left_s = until_s - self._clock()
                part = others, keys[rest], places[rest], object_bytes, left_s, terms
                count += sum(await self._read(*part, first_try=False))
            arrived.append(count)
            if count < end - at:
                break
        return arrived

    async def _put(
        self,
        objects: Sequence[tuple[BlockKey, Pieces]],
        object_bytes: int,
        timeout_s: float,
        request_class: RequestClass,
        places: Sequence[int] | None,
        options: dict[str, Any],
    ) -> tuple[PutOutcome, ...]:
        try:
            if self._client is not None:
                return await self._client.put(
                    objects, object_bytes, timeout_s, request_class=request_class, places=places, **options
                )
        except PinyonError as error:
            _log.info("the KV store took nothing: %s", error.message)
        except Exception:
            _log.exception("putting blocks into the KV store failed")
        return (PutOutcome.FAILED,) * len(objects)
