"""The scheduler's side of the connector: which blocks to fetch before a request runs, and which to save after a step.

It runs in vLLM's EngineCore and never waits: questions to the store are futures. A job's blocks are pinned in vLLM's
pool until every rank has said that it is done, whatever happens to the request meanwhile."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from pinyon.api.worker.v1 import worker_pb2
from pinyon.core.address import is_loopback
from pinyon.core.clock import Clock
from pinyon.core.errors import InvalidArgument
from pinyon.core.orders import FetchSpan, KvSource
from pinyon.core.request import UNKNOWN_CLASS, RequestClass
from pinyon.messages.orders import fetch_spans_from_proto
from pinyon.messages.plan import NAME, open_plan
from pinyon.messages.request_class import class_from_proto
from pinyon.runtime.logging import get_logger
from pinyon.vllm.cached_blocks import CachedBlocks
from pinyon.vllm.drops import Drops
from pinyon.vllm.jobs import Loaded, LoadJob, SaveJob, StepJobs, StepNews
from pinyon.vllm.prompt_keys import KeySpace, PromptKeys, has_keys
from pinyon.vllm.times import RequestTimes, Times

COUNTED = {
    "loaded_blocks": "Blocks that came from the KV store or from peers",
    "peer_blocks": "Blocks that came from peers",
    "load_failures": "Loads of which a block did not come",
    "offered_blocks": "Blocks that were offered to the KV store",
    "unsaved_blocks": "Blocks that were not, as too many waited",
    "late_looks": "Questions to the KV store that were not answered in time",
}
"""The counts, with their meanings."""
AGAIN_S = 0.01
"""The least time between two questions to the store about one request."""
SAVES_MAX = 4096
"""The maximum number of save jobs that are not done."""

_log = get_logger("vllm.scheduler")

Look = Callable[[Sequence[bytes]], "Future[tuple[FetchSpan, ...]]"]
"""Asks the store where it has the first of these keys."""


@dataclass(slots=True, eq=False)
class EnginePrompt:
    """A request of vLLM's, from its arrival to its end."""

    request: Any
    keys: PromptKeys
    times: RequestTimes
    request_class: RequestClass = UNKNOWN_CLASS
    traceparent: str = ""
    preemptions: int = 0
    """The number of times that vLLM has taken its blocks away, as far as we know."""
    reuses: bool = True
    planned: tuple[FetchSpan, ...] = ()
    asks: bool = True
    """True if the store is asked; False if the conductor has planned the fetches."""
    awaits: bool = False
    """True if another instance has just computed the prompt, and may still be putting its blocks into the store."""
    look: Future[tuple[FetchSpan, ...]] | None = None
    looked_from: int = 0
    """The first block that the store was asked for."""
    look_until_s: float = 0.0
    look_again_s: float = 0.0
    """The time from which the store may be asked again, if it does not have all yet."""
    found: tuple[FetchSpan, ...] = ()
    """The sources that the store named last."""
    offer: tuple[int, int, tuple[FetchSpan, ...]] = (0, 0, ())
    """First block, number of blocks, and sources that were offered to vLLM last."""
    valid: int = 0
    """The number of leading blocks with their content when blocks are handed out."""
    loading: LoadJob | None = None
    table: list[int] = field(default_factory=list)
    """vLLM's blocks of the request."""
    done: int = 0
    """The number of leading blocks that are complete, and saved or not to be saved."""


class SchedulerSide:
    """The state of one engine. All methods but :meth:`snapshot` are called by EngineCore's thread."""

    def __init__(
        self,
        space: KeySpace,
        ranks: int,
        look: Look | None,
        times: Times,
        clock: Clock,
        *,
        look_s: float,
        saves: bool,
        pinned_share: float,
        secret: bytes,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._space, self._ranks, self._secret = space, ranks, secret
        self._ask, self._look_s = look, look_s
        self._saves, self._share = saves, pinned_share
        self._clock, self._wake = clock, wake
        self.pool: Any = None
        self.caches = True
        """True if vLLM keeps blocks for other requests; else nothing is reused at all."""
        self.prompts: dict[str, EnginePrompt] = {}
        self.cached = CachedBlocks()
        self.lock = threading.Lock()
        """Held while :attr:`cached` changes, or is read by another thread."""
        self._jobs = itertools.count(1)
        self._loading: dict[int, tuple[LoadJob, list[Any]]] = {}
        """The loads that not all ranks have reported, with vLLM's blocks."""
        self._pinned: dict[int, tuple[list[Any], int]] = {}
        """The save jobs that are not done: vLLM's blocks, and the ranks that have not reported."""
        self._pinned_blocks = 0
        self._drops = Drops()
        self._invalid: set[int] = set()
        """The targets of loads that a rank could not load."""
        self._refused: set[str] = set()
        """Requests whose load has failed: they are computed, or the question would come again for ever."""
        self._next = StepJobs()
        self._steps = 0
        """The number of steps that compute something."""
        self.times = times
        self.counts = dict.fromkeys(COUNTED, 0)
        self.failed_sources: frozenset[str] = frozenset()

    def bind(self, pool: Any) -> None:
        self.pool = pool
        self.caches = bool(pool.enable_caching)
        if self._saves and not self._drops.bind(pool):
            _log.warning("this vLLM's free blocks are not understood: what it drops is not offered to the KV store")
        if not self.caches:  # vLLM does so itself where KV depends on more than the tokens before it
            _log.warning("prefix caching is off: no KV is saved, loaded or lent")

    # -- before a request runs

    def arrived(self, request: Any) -> None:
        """Takes up a new request, and asks the store for its prompt."""
        if not has_keys(request):
            return
        prompt = EnginePrompt(
            request, PromptKeys(self._space, request), RequestTimes(self._clock(), request.num_prompt_tokens)
        )
        self.prompts[request.request_id] = prompt
        self._read_plan(prompt, request.kv_transfer_params)
        prompt.reuses = prompt.reuses and self.caches
        self.times.arrived(prompt.times)
        if prompt.reuses and not request.skip_reading_prefix_cache:
            self._start_look(prompt, 0)

    def _read_plan(self, prompt: EnginePrompt, params: Any) -> None:
        text = params.get(NAME) if isinstance(params, dict) else None
        if text is None:
            return
        try:
            plan: worker_pb2.Plan = open_plan(text, self._secret)
            prompt.request_class = class_from_proto(plan.request_class)
            placement, blocks = plan.placement, prompt.request.num_tokens // self._space.block_tokens
            spans = fetch_spans_from_proto(placement.fetches, blocks)
        except InvalidArgument as error:
            _log.warning("a plan is not used: %s %s", error.field, error.message)
            return
        times = prompt.times
        times.placed_as, times.number = plan.request_id, placement.number
        prompt.traceparent, prompt.reuses = plan.traceparent, not plan.no_reuse
        prompt.planned, prompt.asks = tuple(spans), placement.ask_store or not placement.policy
        times.before_s = plan.prefill_ms * 1e-3
        times.computes = plan.part != worker_pb2.PLAN_PART_DECODE
        times.decodes = plan.part != worker_pb2.PLAN_PART_PREFILL
        if not times.computes:
            self._take_over(prompt, placement, blocks)
        hosts = [span.address.rpartition(":")[0].strip("[]") for span in prompt.planned]
        if not self._secret and not all(map(is_loopback, hosts)):
            prompt.planned, prompt.asks = (), True  # anybody may have written it, and name a source of false KV

    @staticmethod
    def _take_over(prompt: EnginePrompt, placement: Any, blocks: int) -> None:
        """Plans to fetch what the prefill instance has computed: from its memory, or from the store."""
        prompt.asks = prompt.awaits = not placement.prefill_address
        prompt.planned = ()
        if not prompt.awaits and blocks:
            source = placement.prefill_instance_id, placement.prefill_address
            prompt.planned = (FetchSpan(*source, KvSource.PEER, 0, blocks),)

    def _start_look(self, prompt: EnginePrompt, first: int) -> None:
        if self._ask is None or not prompt.asks:
            return
        blocks = (prompt.request.num_tokens - 1) // self._space.block_tokens
        keys = prompt.keys.upto(blocks)[first:blocks]
        prompt.look_until_s, prompt.looked_from = self._clock() + self._look_s, first
        prompt.look = self._ask(keys) if keys else None

    def matched(self, request: Any, computed_tokens: int) -> tuple[int | None, bool]:
        """Returns how many tokens behind vLLM's own can be loaded (None: ask again), and that loads run beside steps.

        At least one token is left to be computed."""
        prompt, size = self.prompts.get(request.request_id), self._space.block_tokens
        nothing = 0, False
        if prompt is None:
            return nothing
        if prompt.preemptions != request.num_preemptions:
            prompt.preemptions = request.num_preemptions
            self._preempted(prompt)
        first, end = computed_tokens // size, (request.num_tokens - 1) // size
        prompt.valid = first
        if not prompt.reuses or request.request_id in self._refused:
            return nothing
        if first >= end or prompt.loading is not None:
            return nothing
        spans = cut(prompt.planned, first, end)
        if not spans and prompt.look is None and prompt.planned and prompt.planned[-1].end > first:
            prompt.asks = True  # the plan does not fit what vLLM holds any more: less than was thought
            prompt.planned = ()
            self._start_look(prompt, first)
        if not spans and prompt.look is not None:
            now_s = self._clock()
            if not prompt.look.done():
                if now_s < prompt.look_until_s:
                    return None, False
                self.counts["late_looks"] += 1
                prompt.look = None
            else:
                found = () if prompt.look.cancelled() or prompt.look.exception() else prompt.look.result()
                prompt.found = cut(found, first, end, prompt.looked_from) or prompt.found
            good = itertools.takewhile(lambda span: span.address not in self.failed_sources, prompt.found)
            spans = cut(tuple(good), first, end)
            if prompt.awaits and now_s < prompt.look_until_s and (not spans or spans[-1].end < end):
                if now_s >= prompt.look_again_s:
                    until_s, prompt.look_again_s = prompt.look_until_s, now_s + AGAIN_S
                    self._start_look(prompt, first)
                    prompt.look_until_s = until_s
                return None, False
        if not spans:
            return nothing
        prompt.offer = first, spans[-1].end - first, spans
        return prompt.offer[1] * size, True

    def allocated(self, request: Any, blocks: Any, external_tokens: int) -> None:
        """Makes a load job, if vLLM has taken up the offer."""
        prompt = self.prompts.get(request.request_id)
        if prompt is None or prompt.loading is not None:
            return
        (ids,) = blocks.get_block_ids()
        with self.lock:
            self._given(self._next, ids[prompt.valid :])  # another connector may load into them
        if external_tokens <= 0:
            return
        first, count, spans = prompt.offer
        count = min(count, external_tokens // self._space.block_tokens)
        targets = list(ids[first : first + count])
        spans = cut(spans, first, first + count)
        keys = prompt.keys.upto(first + count)[first : first + count]
        job = LoadJob(
            next(self._jobs), request.request_id, first, keys, targets, spans if self._ranks == 1 else (),
            prompt.request_class, prompt.traceparent,
        )  # fmt: skip
        prompt.loading = job
        self._loading[job.job_id] = job, self._pin(targets)
        self._next.loads.append(job)
        prompt.times.load_begun(self._clock())

    def not_allocated(self, request: Any, blocks: Any, external_tokens: int) -> None:
        """Makes a load that fails, for a request that waits for one which could not be made."""
        if external_tokens > 0:
            (ids,) = blocks.get_block_ids()
            self._refused.add(request.request_id)
            self._next.loads.append(LoadJob(0, request.request_id, 0, [], list(ids), ()))

    # -- once a step

    def _take_jobs(self) -> StepJobs:
        jobs, self._next = self._next, StepJobs()
        return jobs

    def step_failed(self) -> StepJobs:
        """Returns the jobs after an exception of :meth:`step`: it is not known what the step overwrites."""
        self._next.complete = []
        self.forget_all(self._space)
        return self._take_jobs()

    def step(self, output: Any) -> StepJobs:
        """Returns the jobs of the step that vLLM has just planned; after an exception call :meth:`step_failed`."""
        jobs = self._next
        now_s, size = self._clock(), self._space.block_tokens
        scheduled, cached = output.num_scheduled_tokens, output.scheduled_cached_reqs
        begun: list[tuple[RequestTimes, int, int]] = []
        decodes = kv_tokens = 0
        prompts, resumed, fresh = self.prompts, cached.resumed_req_ids, output.scheduled_new_reqs
        known = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
        with self.lock:
            for new in fresh:
                self._take_blocks(jobs, prompts.get(new.req_id), new.block_ids, new.num_computed_tokens, whole=True)
            begins = ((new.req_id, None, new.num_computed_tokens) for new in fresh)
            for name, ids, computed in itertools.chain(begins, known):
                prompt, tokens = prompts.get(name), scheduled[name]
                if ids or name in resumed:
                    self._take_blocks(jobs, prompt, ids, computed, whole=name in resumed)
                if prompt is None:
                    continue
                end = computed + tokens
                if end >= (prompt.done + 1) * size and self.caches:
                    self._complete(jobs, prompt, computed, tokens)
                if prompt.times.answered:  # a prompt that is computed again counts as neither
                    decodes += tokens == 1
                    kv_tokens += end
                else:
                    begun.append((prompt.times, computed, tokens))
            if self.pool is not None and self.caches:
                self.cached.look(self.pool)
                # Before 0.32 vLLM saves nothing in a step that computes nothing.
                if scheduled and self._drops.offers(len(scheduled)):
                    self._offer_drops(jobs)
        if scheduled:
            self._steps += 1
            jobs.step = self._steps
            self.times.step(jobs.step, now_s, begun, len(scheduled), decodes, kv_tokens)
        if self.cached.changes:
            self._wake()
        return self._take_jobs()

    def _take_blocks(
        self, jobs: StepJobs, prompt: EnginePrompt | None, ids: Any, computed: int, *, whole: bool
    ) -> None:
        """Takes note of the blocks that a request is given now, or of the ``whole`` of its blocks."""
        size = self._space.block_tokens
        (blocks,) = ids
        self._given(jobs, blocks[computed // size :] if whole else blocks)
        if prompt is not None:
            prompt.table = list(blocks) if whole else prompt.table + list(blocks)
            if whole:
                prompt.done = computed // size
                self._used(prompt, 0, blocks[: prompt.done])

    def _given(self, jobs: StepJobs, blocks: Sequence[int]) -> None:
        """Notes that blocks were handed out, to be written to."""
        self.cached.empty_all(blocks)
        self._drops.given(blocks)
        jobs.overwritten += blocks  # all of them: vLLM may have forgotten some that are still lent

    def _preempted(self, prompt: EnginePrompt) -> None:
        """Begins anew with a request that has lost its blocks: some of them may be in the store by now."""
        prompt.planned, prompt.found, prompt.asks = (), (), True
        if prompt.reuses:
            self._start_look(prompt, 0)

    def _complete(self, jobs: StepJobs, prompt: EnginePrompt, computed: int, tokens: int) -> None:
        """Finds the blocks that the step completes. Drafted tokens, which may be rejected, do not count."""
        size = self._space.block_tokens
        end = min((computed + tokens) // size, prompt.request.num_tokens // size, len(prompt.table))
        first = prompt.done
        if end <= first:
            return
        keys, blocks = prompt.keys.upto(end)[first:end], prompt.table[first:end]
        prompt.done = end
        jobs.complete += zip(keys, blocks, strict=True)
        known = [self.cached.holds(key) for key in keys]
        for block, key in zip(blocks, keys, strict=True):
            self.cached.fill(block, key)
        self._used(prompt, first, blocks)
        if self._saves and not prompt.request_class.no_store and not all(known):
            self._save(jobs, range(first, end), keys, blocks, prompt.request_class)

    def _used(self, prompt: EnginePrompt, first: int, blocks: Sequence[int]) -> None:
        """Notes whose content blocks have, for the store's policies when vLLM drops them."""
        if self._saves and not prompt.request_class.no_store:
            self._drops.used(first, blocks, prompt.request_class)

    def _offer_drops(self, jobs: StepJobs) -> None:
        """Offers the blocks that vLLM will drop next to the store, which copies what it does not have (any more)."""
        for request_class, each in self._drops.next(self.cached.key_of).items():
            places, keys, blocks = zip(*each, strict=True)
            self._drops.jobs.update(self._save(jobs, places, keys, blocks, request_class))

    def _save(
        self,
        jobs: StepJobs,
        places: Iterable[int],
        keys: Iterable[bytes],
        blocks: Sequence[int],
        request_class: RequestClass,
    ) -> list[int]:
        """Makes a save job, and returns its number; none if too many blocks wait."""
        if len(self._pinned) >= SAVES_MAX or self._pinned_blocks + len(blocks) > self._share * len(self.pool.blocks):
            self.counts["unsaved_blocks"] += len(blocks)
            return []
        job = SaveJob(next(self._jobs), list(places), list(keys), list(blocks), request_class)
        self._pinned[job.job_id] = self._pin(blocks), self._ranks
        self._pinned_blocks += len(blocks)
        jobs.saves.append(job)
        return [job.job_id]

    def _pin(self, blocks: Sequence[int]) -> list[Any]:
        pinned = [self.pool.blocks[block] for block in blocks]
        self.pool.touch(pinned)
        return pinned

    # -- after a step

    def news(self, output: Any) -> None:
        """Takes the workers' news: jobs that are done, blocks that did not come."""
        news = output.kv_connector_worker_meta
        if isinstance(news, StepNews):
            self.times.step_ended(news.step, self._clock())
            for job_id, ranks in news.saved.items():
                self._saved(job_id, ranks)
            for loaded in news.loaded:
                self._loaded_at_a_rank(loaded)
            self.failed_sources = news.failed_sources
        if self._loading:  # ranks end a load in different steps
            self._invalid.update(output.invalid_block_ids or ())
        for name in output.finished_recving or ():
            self._received(name)

    def _saved(self, job_id: int, ranks: int) -> None:
        blocks, left = self._pinned.get(job_id, ([], 0))
        if left > ranks:
            self._pinned[job_id] = blocks, left - ranks
        elif left:
            del self._pinned[job_id]
            self._pinned_blocks -= len(blocks)
            self.counts["offered_blocks"] += len(blocks)
            if job_id in self._drops.jobs:
                self._drops.saved(job_id, blocks)
            else:
                self.pool.free_blocks(reversed(blocks))

    def _loaded_at_a_rank(self, loaded: Loaded) -> None:
        self.counts["peer_blocks"] += loaded.peer_blocks  # of one rank: several read no peers
        entry = self._loading.get(loaded.job_id)
        if entry is not None and (prompt := self.prompts.get(entry[0].request_id)) is not None:
            prompt.times.loaded(loaded)

    def _received(self, name: str) -> None:
        """Ends a load, when every rank has reported."""
        job_id = next((number for number, (job, _) in self._loading.items() if job.request_id == name), 0)
        if not job_id:
            return
        job, blocks = self._loading.pop(job_id)
        good = next((place for place, block in enumerate(job.blocks) if block in self._invalid), len(job.blocks))
        self._invalid.difference_update(job.blocks if self._loading else tuple(self._invalid))
        prompt = self.prompts.get(name)
        if good < len(job.blocks):
            self._refused.add(name)
            self.counts["load_failures"] += 1
        self.counts["loaded_blocks"] += good
        with self.lock:
            for block, key in zip(job.blocks[:good], job.keys, strict=False):
                self.cached.fill(block, key)
        self.pool.free_blocks(reversed(blocks))
        if prompt is None:
            self._refused.discard(name)
            return
        prompt.loading, prompt.valid = None, job.first + good
        prompt.times.load_ended(self._clock(), good, self._space.block_tokens)

    def ended(self, request: Any) -> None:
        """Forgets a request. Jobs of it go on, and hold their blocks."""
        prompt = self.prompts.pop(request.request_id, None)
        if prompt is None or prompt.loading is None:
            self._refused.discard(request.request_id)
        if prompt is None:
            return
        if prompt.look is not None:
            prompt.look.cancel()
        self.times.ended(prompt.times)
        self._wake()

    @property
    def pins(self) -> int:
        """The number of jobs that hold blocks."""
        return len(self._pinned) + len(self._loading)

    @property
    def saving(self) -> bool:
        """True if vLLM must go on with steps, so that save jobs can end, or the workers hear what is void."""
        return bool(self._pinned) or self._next.forget

    @property
    def frees(self) -> bool:
        """True if blocks become free when a job ends: vLLM waits for that, and preempts nobody meanwhile."""
        held = [*(blocks for blocks, _ in self._pinned.values()), *(blocks for _, blocks in self._loading.values())]
        return any(block.ref_cnt == 1 for blocks in held for block in blocks)

    def forget_all(self, space: KeySpace) -> None:
        """Makes all content void: from now on, keys are of another space."""
        with self.lock:
            self.cached.clear()
        self._drops.clear()
        self._space = space
        for prompt in self.prompts.values():  # they go on, but what they hold is of neither space
            self.times.ended(prompt.times)
        self.prompts.clear()
        self._next.forget = True

    # -- for the report

    def changes(self) -> tuple[list[bytes], list[bytes]]:
        with self.lock:
            return self.cached.changes.drain()

    def snapshot(self) -> list[bytes]:
        """Returns the keys of all blocks that have content, after a look at each in vLLM's pool."""
        with self.lock:
            if self.pool is not None:
                self.cached.look(self.pool, every=True)
            return self.cached.keys()


def cut(spans: Sequence[FetchSpan], first: int, end: int, base: int = 0) -> tuple[FetchSpan, ...]:
    """Returns the parts of the spans within ``[first, end)`` that follow each other from ``first`` on.

    The spans count blocks from block ``base`` of the prompt."""
    found: list[FetchSpan] = []
    for span in spans:
        begin, stop = max(first, base + span.first), min(end, base + span.end)
        if begin == first and begin < stop:
            found.append(FetchSpan(span.source_id, span.address, span.source, begin, stop))
            first = stop
    return tuple(found)
