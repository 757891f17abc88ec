"""The worker's Prometheus metrics: counters of events, gauges that read the parts, and an observer of engine steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from prometheus_client import CollectorRegistry

from pinyon.batching import StepSeen
from pinyon.core.clock import Clock
from pinyon.core.orders import PrefillReport
from pinyon.core.request import FinishReason
from pinyon.runtime.eviction import show_eviction
from pinyon.runtime.ledger import Ledger
from pinyon.runtime.metrics import Figure, Figures
from pinyon.runtime.tally import Count, Tally
from services.worker.decode.decodes import Decodes
from services.worker.decode.lb_sessions import LbSessions
from services.worker.instance.parts import Parts
from services.worker.instance.step_members import EngineStep, StepMembers, StepOutcome
from services.worker.kv.cache import KvCache
from services.worker.kv.storage import Drop
from services.worker.prefill.peers import PrefillPeers
from services.worker.prefill.prefills import Prefills
from services.worker.report import WorkerReport

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
LOCAL, PEER, STORE = ("local",), ("peer",), ("store",)
PREFILL_PARTS = ("queue", "fetch", "compute", "push")


class WorkerMetrics:
    """Counters of events: once per step or request, never per token."""

    def __init__(self, registry: CollectorRegistry) -> None:
        count, tally = partial(Count, registry=registry), partial(Tally, buckets=_SECONDS, registry=registry)
        self._sampled = count("pinyon_worker_generated_tokens", "Tokens sampled.")
        self._computed = count("pinyon_worker_prefill_tokens", "Prompt tokens computed.")
        self._reused = count("pinyon_worker_reused_tokens", "Prompt tokens whose KV was reused.", ("source",))
        for source in (LOCAL, PEER, STORE):
            self._reused.add(source, 0)
        self._ended = count("pinyon_worker_requests", "Requests ended.", ("reason",))
        for reason in FinishReason:
            self._ended.add((reason.value,), 0)
        self._step = tally("pinyon_worker_step_seconds", "Length of an engine step.")
        self._rows = count("pinyon_worker_step_tokens", "Tokens that went through engine steps.")
        self._ttft = tally("pinyon_worker_first_token_seconds", "From a request's arrival here to its first token.")
        self._room = tally("pinyon_worker_room_wait_seconds", "How long a request or prompt waited for its KV blocks.")
        self._passed_over = tally(
            "pinyon_worker_passed_over_seconds",
            "Time for which later requests got KV blocks before a request, if the batching policy limits it.",
        )
        self._batch = tally("pinyon_worker_batch_requests", "Requests that a step decodes.", buckets=_REQUESTS)
        self._parts = tally("pinyon_worker_prefill_seconds", "Parts of a prefill: queue, fetch, compute, push.", "part")
        for part in PREFILL_PARTS:
            self._parts.show(part)

    def step(self, step: EngineStep, outcome: StepOutcome, sampled: int) -> None:
        self._step.observe(outcome.elapsed_s)
        self._rows.add(amount=step.tokens)
        self._sampled.add(amount=sampled)
        if step.decodes:
            self._batch.observe(len(step.decodes))

    def room_wait(self, seconds: float, passed_over_s: float) -> None:
        self._room.observe(seconds)
        self._passed_over.observe(passed_over_s)

    def prefill(self, report: PrefillReport) -> None:
        self._computed.add(amount=report.computed_tokens)
        self._reused.add(LOCAL, report.local_tokens)
        self._reused.add(PEER, report.peer_tokens)
        self._reused.add(STORE, report.store_tokens)
        for part in PREFILL_PARTS:
            self._parts.observe(getattr(report, f"{part}_ms") / 1e3, part)

    def first_token(self, seconds: float) -> None:
        self._ttft.observe(seconds)

    def request_ended(self, reason: FinishReason) -> None:
        self._ended.add((reason.value,))


def register_gauges(
    registry: CollectorRegistry,
    parts: Parts,
    prefills: Prefills,
    peers: PrefillPeers,
    decodes: Decodes,
    sessions: LbSessions,
    load: WorkerReport,
) -> None:
    """Registers the gauges of a running worker. All but the last eight are zero when the worker is idle."""
    cache, members, storage = parts.cache, parts.members, parts.storage
    below, swaps = cache.pool.below, cache.swaps
    gauges: list[Figure] = [
        ("owned_requests", "Requests that hold anything here.", lambda: decodes.owned),
        ("pending_requests", "Requests accepted and not yet in the batch.", lambda: decodes.pending),
        (
            "waiting_for_room",
            "Requests and prompts that wait for KV blocks or a place in the batch; above 0, nothing more is pushed.",
            lambda: load.batch().waiting,
        ),
        ("running_requests", "Requests in the batch.", lambda: members.running),
        ("queued_prefills", "Prompts that wait to be computed.", lambda: prefills.queue.queued),
        ("running_prefills", "Prompts being fetched, computed or sent.", lambda: prefills.queue.active),
        ("pending_prefill_tokens", "Prompt tokens accepted and not computed.", lambda: prefills.queue.pending_tokens),
        (
            "room_wait_seconds_expected",
            "How long a request that comes now would wait for KV blocks.",
            cache.room_wait_s,
        ),
        ("room_waiters", "Requests and prompts that wait for KV blocks.", lambda: cache.admission.waiting),
        ("pushes", "Prompts being sent to a decode instance.", lambda: prefills.pushing),
        ("remote_prefills", "Prompts computed elsewhere that are not settled.", lambda: peers.in_flight),
        ("leases", "Leases of readers.", lambda: cache.leases),
        ("outbox_tokens", "Tokens not sent yet.", lambda: sessions.unsent),
        (
            "batches_per_round",
            "Batches in which all running requests get one token each; 0: a policy without rounds, so one batch.",
            lambda: members.formed.batches,
        ),
        (
            "batch_shared_blocks",
            "KV blocks shared by the whole present batch; with a policy without rounds, by all admitted requests.",
            lambda: members.formed.shared_blocks,
        ),
        (
            "batch_homogeneity",
            "Share of these prompts' full blocks that all of them share.",
            lambda: members.formed.homogeneity,
        ),
        (
            "batch_reward_tokens_per_second",
            "Decode throughput of the last round that the batching policy learned from.",
            lambda: members.formed.reward_tokens_s,
        ),
        (
            "batch_exploring",
            "Share of the batching policy's decisions made to learn more.",
            lambda: members.formed.exploring,
        ),
        ("engine_hangs", "1 while an engine step takes too long.", lambda: parts.engine_loop.hangs),
        ("store_queue_blocks", "Blocks that wait for the KV store.", lambda: storage.pending),
        ("swapping_blocks", "Blocks copied between the tiers now.", lambda: 0 if swaps is None else swaps.under_way),
        ("used_blocks", "KV blocks with references.", lambda: cache.pool.used),
        ("spared_blocks", "KV blocks that waiting requests want.", lambda: cache.pool.eviction.wanted),
        ("cached_blocks", "KV blocks kept only for reuse.", lambda: cache.pool.cached),
        ("free_blocks", "KV blocks without content.", lambda: cache.pool.free),
        ("room_requests", "Further requests that would have room at once.", lambda: load.batch().room),
        ("total_blocks", "KV blocks of the pool.", lambda: cache.pool.total),
        ("dram_blocks", "KV blocks kept in the second tier.", lambda: 0 if below is None else len(below)),
        ("dram_free_blocks", "Blocks of the second tier without content.", lambda: 0 if below is None else below.free),
        ("lb_sessions", "Load balancers connected.", lambda: sessions.count),
        ("prefill_peers", "Prefill instances connected.", lambda: peers.sessions),
    ]
    totals: list[Figure] = [
        (
            "preemptions",
            "Requests that gave up their KV blocks for others and are computed again.",
            lambda: members.preemptions,
        ),
        (
            "cut_steps",
            "Steps that computed less of prompts, so that running requests do not wait for their tokens.",
            lambda: members.scheduler.cut_steps,
        ),
        ("scheduling_seconds", "Time taken to choose what steps compute.", lambda: members.scheduling_s),
        (
            "batching_shifts",
            "Times that the batching policy's learned values stopped being true.",
            lambda: members.formed.shifts,
        ),
        ("stored_blocks", "Blocks put into the KV store.", lambda: storage.stored),
        ("fetch_failures", "Fetches that did not bring everything.", lambda: parts.fetcher.failures),
        ("corrupt_blocks", "Blocks that arrived with other bytes than were put.", lambda: parts.fetcher.corrupt),
        ("cut_sessions", "Sessions cut off as too slow.", lambda: sessions.cut),
    ]
    labelled: list[tuple[str, str, str, Callable[[], Mapping[str, float]]]] = [
        (
            "dropped_blocks",
            "Blocks not put into the KV store.",
            "reason",
            lambda: {reason.value: storage.drops[reason] for reason in Drop},
        )
    ]
    if below is not None and swaps is not None:
        totals += [
            ("lost_swaps", "Blocks lost because too many others were being moved.", lambda: below.lost),
            ("swapped_bytes", "Bytes copied between the tiers.", lambda: swaps.bytes),
            ("swap_seconds", "Time taken to copy them.", lambda: swaps.seconds),
        ]
        labelled += [
            (
                "hit_blocks",
                "Blocks that were found and reused.",
                "tier",
                lambda: {"pool": cache.pool.hits - below.swapped_in, "dram": below.swapped_in},
            ),
            (
                "swapped_blocks",
                "Blocks moved between the tiers.",
                "to",
                lambda: {"dram": below.swapped_out, "pool": below.swapped_in},
            ),
        ]
    registry.register(Figures("pinyon_worker", gauges, totals, labelled))
    show_eviction(registry, "worker", "blocks", cache.pool.of_all)


class StepObserver:
    """The observer of one engine loop."""

    def __init__(
        self, metrics: WorkerMetrics, cache: KvCache, members: StepMembers, ledger: Ledger, clock: Clock
    ) -> None:
        self._metrics = metrics
        self._cache = cache
        self._members = members
        self._ledger = ledger
        self._clock = clock
        self._last_decode_s = 0.0
        """The time of the last step's end, if it decoded and a request still waits for its next token; else 0."""

    def observe(self, step: EngineStep, outcome: StepOutcome, sampled: int) -> None:
        self._metrics.step(step, outcome, sampled)
        decodes = len(step.decodes)
        seen = StepSeen(decodes, step.tokens - decodes, outcome.elapsed_s, decode_s=outcome.decode_s)
        self._cache.admission.observe(seen)
        self._members.scheduler.observe(seen)
        if not decodes:
            self._last_decode_s = 0.0
            return
        now_s = self._clock()
        if self._last_decode_s:
            running = self._members.running
            kv_tokens = self._members.kv_tokens if decodes < running else step.kv_tokens  # some may have ended in it
            times = self._ledger.token_times
            times.decoded(decodes, now_s - self._last_decode_s, kv_tokens, running=running)
        # If all requests have ended, the time until the next request is not a time between tokens.
        self._last_decode_s = now_s if self._members.running else 0.0
