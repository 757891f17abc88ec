"""The worker's side of the connector: it moves blocks between vLLM's memory, the KV store and other instances.

vLLM's worker thread only hands work over and collects what is done. Nothing here waits for the network in that thread,
and nothing raises into it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from pinyon.core.avoidance import Avoidance
from pinyon.core.clock import Clock
from pinyon.core.errors import PinyonError
from pinyon.core.orders import FetchSpan, KvSource
from pinyon.runtime.logging import get_logger
from pinyon.runtime.loop_thread import LoopThread
from pinyon.store.reader import ReadTerms
from pinyon.store.sync_store import SyncStore
from pinyon.store.writer import PutOutcome
from pinyon.vllm.jobs import Loaded, LoadJob, SaveJob, StepJobs, StepNews
from pinyon.vllm.lending import Lending
from pinyon.vllm.memory import EngineMemory, Fence, passed
from pinyon.vllm.prompt_keys import shard_keys

RATE_MIN_BYTES_S = 1 << 30
SAVES_AT_ONCE = 2
"""The number of puts that run at a time."""

_log = get_logger("vllm.worker")


class WorkerSide:
    """One rank. All methods without an underscore are called by vLLM's worker thread."""

    def __init__(
        self,
        thread: LoopThread,
        store: SyncStore,
        memory: EngineMemory,
        lending: Lending | None,
        *,
        rank: int,
        ranks: int,
        load_s: float,
        store_s: float,
        store_queue_s: float,
        clock: Clock = time.monotonic,
    ) -> None:
        self._thread, self._store, self._memory, self._lending = thread, store, memory, lending
        self._rank, self._ranks = rank, ranks
        self._load_s, self._store_s, self._store_queue_s = load_s, store_s, store_queue_s
        self._clock = clock
        self._lock = threading.Lock()
        self._received: set[str] = set()
        self._failed: set[int] = set()
        """Blocks whose content did not come."""
        self._news = StepNews()
        self._pauses = Avoidance(first_s=1.0, max_s=8.0, max_peers=1)
        self._puts = asyncio.Semaphore(SAVES_AT_ONCE)
        self._step = 0

    # -- one step

    def begin(self, jobs: StepJobs) -> None:
        """Begins a step, before it computes: what it overwrites is lent to nobody from here on."""
        self._step = jobs.step
        if self._lending is None:
            return
        try:
            if jobs.forget:
                self._lending.forget()
            if jobs.overwritten:
                self._lending.overwritten(jobs.overwritten)
        except Exception:  # a block may be lent that is no more what it was
            self._lending.stop()
            raise

    def load(self, jobs: StepJobs) -> None:
        """Starts the step's loads, which run beside this step and the next ones."""
        for job in jobs.loads:
            if not job.keys:  # it could not be made
                self._loaded(job, [], 0.0, ())
                continue
            try:
                fence = self._memory.fence()  # older steps may still read what was in these blocks
                self._submit(self._load(job, fence), partial(self._loaded, job, [], 0.0, ()))
            except Exception:
                _log.exception("a load was not begun")
                self._loaded(job, [], 0.0, ())

    def end(self, jobs: StepJobs) -> None:
        """Ends a step, which has been computed, or on a GPU has been launched."""
        if not jobs.complete and not jobs.saves:
            return
        try:
            self._end(jobs)
        except Exception:
            for job in jobs.saves:
                self._saved(job)
            raise

    def _end(self, jobs: StepJobs) -> None:
        fence = self._memory.fence()
        if self._lending is not None and jobs.complete:
            batch = self._lending.promised(jobs.complete)
            if fence is None:
                self._lending.filled(batch)
            else:
                self._submit(self._fill(self._lending, fence, batch), lambda: None)
        now_s = self._clock()
        for job in jobs.saves:
            self._submit(self._save(job, now_s, fence), partial(self._saved, job))

    def take(self) -> tuple[set[str], set[int]]:
        """Returns the requests whose loads have ended since the last call, and the blocks that did not come."""
        with self._lock:
            received, self._received = self._received, set()
            failed, self._failed = self._failed, set()
        return received, failed

    def news(self) -> StepNews | None:
        """Returns what the scheduler's side is to know; None: nothing new."""
        failed_sources = self._store.failed_sources()
        with self._lock:
            old, step = self._news, self._step
            if not step and not old.saved and not old.loaded and failed_sources == old.failed_sources:
                return None
            news, self._news = old, StepNews(failed_sources=failed_sources)
        news.step, news.failed_sources = step, failed_sources
        return news

    def _submit(self, work: object, failed: Callable[[], None]) -> None:
        def ended(future: Future[None]) -> None:
            if future.cancelled() or future.exception() is not None:
                if not future.cancelled():
                    _log.error("a job failed", exc_info=future.exception())
                failed()

        try:
            self._thread.submit(work).add_done_callback(ended)  # type: ignore[arg-type]
        except PinyonError:
            failed()

    # -- loads, on the loop

    async def _load(self, job: LoadJob, fence: Fence | None) -> None:
        await passed(fence)
        began_s = self._clock()
        size = self._memory.kv.object_bytes
        keys = shard_keys(job.keys, self._rank, self._ranks)
        timeout_s = self._load_s + len(keys) * size / RATE_MIN_BYTES_S
        spans = job.spans
        if not spans:
            found = await asyncio.wrap_future(self._store.look(keys, size, timeout_s))
            spans = tuple(
                FetchSpan(each.source_id, each.address, each.source, job.first + each.first, job.first + each.end)
                for each in found
            )
        terms = ReadTerms(job.request_id, job.traceparent, job.request_class, job.first)
        places = [self._memory.kv.pieces(block) for block in job.blocks]
        left_s = timeout_s - (self._clock() - began_s)
        arrived = await asyncio.wrap_future(self._store.read(spans, keys, places, size, left_s, terms))
        self._loaded(job, arrived, self._clock() - began_s, spans)

    def _loaded(self, job: LoadJob, arrived: Sequence[int], seconds: float, spans: Sequence[FetchSpan]) -> None:
        """Ends a load, whatever came of it: each is reported once."""
        size, total = self._memory.kv.object_bytes, sum(arrived)
        if self._lending is not None and total:
            self._lending.filled(dict(zip(job.blocks, job.keys[:total], strict=False)))
        peers = sum(count for count, span in zip(arrived, spans, strict=False) if span.source is KvSource.PEER)
        whole = [
            (span.source_id, count * size, seconds * count / total)
            for count, span in zip(arrived, spans, strict=False)
            if count and count == span.end - span.first
        ]
        with self._lock:
            self._received.add(job.request_id)
            self._failed.update(job.blocks[total:])
            self._news.loaded.append(Loaded(job.job_id, peers, total - peers, seconds, tuple(whole)))

    # -- saves, on the loop

    @staticmethod
    async def _fill(lending: Lending, fence: Fence, batch: dict[int, bytes]) -> None:
        await passed(fence)
        lending.filled(batch)

    async def _save(self, job: SaveJob, since_s: float, fence: Fence | None) -> None:
        """Puts the job's blocks when their turn comes, unless that is too late, or the store fails just now."""
        async with self._puts:
            now_s = self._clock()
            if now_s - since_s <= self._store_queue_s and not self._pauses.avoids("store", now_s):
                await self._put(job, fence)
        self._saved(job)

    def _saved(self, job: SaveJob) -> None:
        """Says that the job's blocks are not read any more."""
        with self._lock:
            self._news.saved[job.job_id] = 1

    async def _put(self, job: SaveJob, fence: Fence | None) -> None:
        await passed(fence)
        keys = shard_keys(job.keys, self._rank, self._ranks)
        objects = [(key, self._memory.kv.pieces(block)) for key, block in zip(keys, job.blocks, strict=True)]
        size = self._memory.kv.object_bytes
        outcomes = await asyncio.wrap_future(
            self._store.put(objects, size, self._store_s, job.request_class, job.places)
        )
        if all(each in (PutOutcome.FAILED, PutOutcome.NO_SPACE) for each in outcomes):
            self._pauses.failed("store", self._clock())
        else:
            self._pauses.succeeded("store")
