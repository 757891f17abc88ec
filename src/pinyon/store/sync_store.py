"""The KV store for threads without an event loop, such as an inference engine's."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from itertools import takewhile

from pinyon.core.avoidance import Avoidance
from pinyon.core.block_keys import BlockKey
from pinyon.core.clock import Clock
from pinyon.core.errors import PinyonError
from pinyon.core.orders import FetchSpan
from pinyon.core.request import UNKNOWN_CLASS, RequestClass
from pinyon.runtime.logging import get_logger
from pinyon.runtime.loop_thread import LoopThread
from pinyon.store.client import StoreClient
from pinyon.store.kv_memory import Pieces
from pinyon.store.reader import BlockReader, ReadTerms
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

        Returns how many blocks of each span arrived. After a span that did not arrive whole, no other is read."""
        return self._thread.submit(self._read(spans, keys, places, object_bytes, timeout_s, terms))

    def put(
        self,
        objects: Sequence[tuple[BlockKey, Pieces]],
        object_bytes: int,
        timeout_s: float,
        request_class: RequestClass = UNKNOWN_CLASS,
        places: Sequence[int] | None = None,
    ) -> Future[tuple[PutOutcome, ...]]:
        """Stores the objects that the store lacks: see :meth:`StoreClient.put`."""
        return self._thread.submit(self._put(objects, object_bytes, timeout_s, request_class, places))

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
    ) -> list[int]:
        arrived: list[int] = []
        until_s = self._clock() + timeout_s
        base = spans[0].first if spans else 0
        for span in spans:
            part = slice(span.first - base, span.end - base)
            left_s = until_s - self._clock()
            count = 0
            if self._reader is not None and left_s > 0 and not self._avoidance.avoids(span.address, self._clock()):
                count = await read_span(
                    *(self._reader, self._avoidance, self._clock, span, keys[part], places[part], object_bytes),
                    *(left_s, timeout_s, terms),
                )
            arrived.append(count)
            if count < span.end - span.first:
                break
        return arrived

    async def _put(
        self,
        objects: Sequence[tuple[BlockKey, Pieces]],
        object_bytes: int,
        timeout_s: float,
        request_class: RequestClass,
        places: Sequence[int] | None,
    ) -> tuple[PutOutcome, ...]:
        try:
            if self._client is not None:
                return await self._client.put(
                    objects, object_bytes, timeout_s, request_class=request_class, places=places
                )
        except PinyonError as error:
            _log.info("the KV store took nothing: %s", error.message)
        except Exception:
            _log.exception("putting blocks into the KV store failed")
        return (PutOutcome.FAILED,) * len(objects)
