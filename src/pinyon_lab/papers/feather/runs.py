"""FEATHER's workloads and server in the simulator: prompts that share prefixes, and the results of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from random import Random
from typing import Final, NamedTuple

from pinyon.core.request import Role
from pinyon.eviction import NO_TRAITS
from pinyon.profiles.engine_profile import load_profile
from pinyon.profiles.machine_profile import load_machine
from pinyon_lab.figures.figure import Tell
from pinyon_lab.simulator.cluster import SimCluster
from pinyon_lab.simulator.cluster_settings import NO_COST, ClusterSettings, SchedulingCost
from pinyon_lab.simulator.models import ClusterModel
from pinyon_lab.simulator.report import FINISHED, RequestOutcome
from pinyon_lab.simulator.workload import Arrival

PAPER: Final = "FEATHER"
BLOCK: Final = 16
"""The tokens of a block (§3.1)."""
MACHINE: Final = "rtx6000ada-llama-8b"
MAX_BATCH: Final = 500
"""The largest batch, in requests (§3.1)."""
BUDGET: Final = 32_768
"""The token budget of a step (§5.2)."""
ACTIVE_PREFILLS: Final = 1_024
"""The number of prompts for which a step has room: the paper's engine has no bound but its budget."""
OWN_TOKENS: Final = 32
"""Our choice: the tokens of each request after the shared prefix."""
REQUESTS = 1_000
"""Our choice: the requests of a run; the paper nowhere prints how long its runs are."""
PASSED_OVER_S: Final = 3600
"""The longest time for which a request may be passed over: the paper's loop has no bound; ours is 10 s by default."""
SAMPLE_S: Final = 5.0
SEED: Final = 0
WARM_S: Final = 100_000.0
"""The time between warm-up and what counts, and between successive batches: by then, all requests have ended."""

FCFS, NEVER = "fcfs", "never"
BOUND: Final = f"passed_over_s={PASSED_OVER_S}"
POLICIES: Final = {
    FCFS: "fcfs",
    "bandit": f"feather:stop=bandit,{BOUND}",
    "q_learning": f"feather:stop=q_learning,{BOUND}",
    "heuristic": f"feather:stop=heuristic,{BOUND}",
    NEVER: f"feather:stop=never,{BOUND}",
    "oracle": f"oracle:{BOUND}",
    "dynamic": "dynamic",
    "sglang_fcfs": "sglang_fcfs",
    "lpm": "lpm:fallback=0",
    "dfs_weight": "dfs_weight",
}

CHAPTER_3_NOTE = (
    "Modelled: batching by fcfs on one instance with the profile `rtx6000ada-llama-8b`; all prompts are sent once "
    "before, so that KV that fits is resident. What the gain by a shared prefix amounts to was put in "
    "(`decode_shared_share` 0.4, between what Experiments 1 and 2 print), and that it is all or nothing: only what "
    "the whole batch shares counts. What follows from that with other lengths, groups, trees, models and batch "
    "sizes, and what memory does, is what comes out."
)
_SERVER = (
    "Modelled: one instance by the profile named, batches of 500, steps of 32,768 tokens; who is admitted, what a "
    "step decodes, and the cache are the code that serves."
)
NOTE = f"{_SERVER} What decisions take on the CPU is left out."
_SERVED = (
    "Poisson arrivals (seed 0), 32 tokens of each request's own behind its prefix, so many requests as the table has "
    "in its note; throughput is all output tokens over the time from the first arrival to the last end. TBT is the "
    "mean over requests. The batch is that of a step, as the paper counts it: a round of feather has several. "
    "`passed_over_s` is 3600: the paper's loop has no bound."
)
NOTES = [NOTE, _SERVED]
WAIT_NOTES = [_SERVER, _SERVED]
"""The notes of a server whose scheduler takes time."""


def label(policy: str) -> str:
    if policy == NEVER:
        return "feather, never stops"
    return f"feather, {policy}" if POLICIES[policy].startswith("feather") else policy


class PromptParts:
    """Block ids of prompts made of named parts: prompts that begin with the same parts share those blocks."""

    def __init__(self) -> None:
        self._known: dict[tuple[tuple[str, ...], int, int], tuple[int, ...]] = {}
        self._next = 0

    def blocks(self, parts: Sequence[tuple[str, int]]) -> tuple[int, ...]:
        """Returns a prompt's block ids; ``parts`` are names with tokens. A block belongs to its last token's part."""
        found: tuple[int, ...] = ()
        path: tuple[str, ...] = ()
        end = 0
        for place, (name, tokens) in enumerate(parts):
            path = (*path, name)
            end += tokens
            last = end // BLOCK if place < len(parts) - 1 else -(-end // BLOCK)
            found += self._of(path, len(found), last)
        return found

    def _of(self, path: tuple[str, ...], first: int, last: int) -> tuple[int, ...]:
        ids = self._known.get((path, first, last))
        if ids is None:
            ids = tuple(range(self._next, self._next + max(0, last - first)))
            self._next += len(ids)
            self._known[path, first, last] = ids
        return ids

    def arrival(self, time_s: float, parts: Sequence[tuple[str, int]], output_tokens: int) -> Arrival:
        return Arrival(time_s, sum(tokens for _, tokens in parts), output_tokens, self.blocks(parts), NO_TRAITS)


@dataclass(frozen=True, slots=True)
class FeatherServer:
    """One instance; ``policy`` is a name of :data:`POLICIES`."""

    policy: str = FCFS
    machine: str = MACHINE
    max_batch: int = MAX_BATCH
    kernel: str = "whole"
    """The kernel, see :attr:`ClusterSettings.attention_kernel`."""
    chunk_blocks: int = 0
    """The blocks of a chunk of ``feather``; 0 means its default."""
    scheduling: SchedulingCost = NO_COST

    def cluster(self) -> SimCluster:
        machine = load_machine(self.machine)
        chunks = f",chunk_blocks={self.chunk_blocks}" if self.chunk_blocks else ""
        settings = ClusterSettings(
            (Role.MIXED,),
            BLOCK,
            machine.hbm_tokens,
            max_batch=self.max_batch,
            step_tokens=BUDGET,
            chunk_tokens=BUDGET,
            active_prefills=ACTIVE_PREFILLS,
            batching=POLICIES[self.policy] + chunks,
            service_order="fifo",
            slo_s=1e6,
            attention_kernel=self.kernel,
            scheduling=self.scheduling,
        )
        return ClusterModel(settings, machine, load_profile(machine.engine), "round_robin").cluster()


PLAIN: Final = FeatherServer()


class BatchRun(NamedTuple):
    """The results of batches: ``tokens_s`` is over the whole time, ``decode_tokens_s`` over that of decoding steps."""

    tokens_s: float
    decode_tokens_s: float
    batch: float
    """The mean number of requests in a decoding step."""
    step_s: float
    """The mean time of a decoding step."""
    kv_tokens: float
    """The mean number of tokens whose KV a decoding step reads, as the profile counts them."""
    evicted: int
    """The number of blocks evicted."""
    seconds: float


Parts = Sequence[tuple[str, int]]


def one_batch(prompts: Sequence[Parts], output_tokens: int, server: FeatherServer = PLAIN) -> BatchRun:
    """Runs one batch whose requests arrive at once; all prompts were sent once before."""
    return batches([prompts], output_tokens, server, warm=True)


def batches(
    groups: Sequence[Sequence[Parts]], output_tokens: int, server: FeatherServer = PLAIN, *, warm: bool = False
) -> BatchRun:
    """Runs batches one after the other on one cache; with ``warm``, all prompts were sent once before."""
    made = PromptParts()
    arrivals = [made.arrival(0.0, parts, 1) for prompts in groups for parts in prompts] if warm else []
    before = len(arrivals)
    for number, prompts in enumerate(groups, start=1):
        arrivals += [made.arrival(WARM_S * number, parts, output_tokens) for parts in prompts]
    cluster = server.cluster()
    evicted: list[int] = []
    cluster.time.at(WARM_S / 2, lambda: evicted.append(cluster.evicted))
    outcomes = cluster.run(arrivals)[before:]
    assert all(each.end == FINISHED for each in outcomes)
    ends: dict[float, float] = {}
    for each in outcomes:
        ends[each.arrived_s] = max(ends.get(each.arrived_s, 0.0), each.e2e_s)
    seconds = sum(ends.values())
    (engine,) = cluster.members.engines.values()
    sums = engine.decode_sums
    return BatchRun(
        sum(each.output_tokens for each in outcomes) / seconds,
        sums.tokens / max(1e-9, sums.seconds),
        sums.tokens / max(1, sums.steps),
        sums.seconds / max(1, sums.steps),
        sums.kv_tokens / max(1, sums.steps),
        cluster.evicted - evicted[0],
        seconds,
    )


@dataclass(frozen=True, slots=True)
class FeatherLoad:
    """A load, by default that of §5.2. If ``groups`` is 0, no prompts share anything. If ``levels`` exceeds 1, a tree
    (Fig. 3.7) replaces the groups. ``rates``, pairs of requests/s and seconds, replace ``rate`` and ``requests``."""

    rate: float = 100.0
    groups: int = 5
    prefix_tokens: int = 5_000
    output_tokens: int = 200
    requests: int = 0
    """The number of requests; 0 means the same number as all runs have."""
    levels: int = 1
    rates: tuple[tuple[float, float], ...] = ()

    def arrivals(self) -> list[Arrival]:
        rng, made = Random(SEED), PromptParts()
        arrivals = []
        for number, time_s in enumerate(self._times(rng)):
            parts = [*self._prefix(number, rng), (f"own {number}", OWN_TOKENS)]
            arrivals.append(made.arrival(time_s, parts, self.output_tokens))
        return arrivals

    def _prefix(self, number: int, rng: Random) -> list[tuple[str, int]]:
        if not self.groups:
            return [(f"alone {number}", self.prefix_tokens)]
        if self.levels == 1:
            return [(f"prefix {rng.randrange(self.groups)}", self.prefix_tokens)]
        return tree(rng.randrange(1 << (self.levels - 1)), self.levels, self.prefix_tokens)

    def _times(self, rng: Random) -> list[float]:
        times, now_s = [], 0.0
        if not self.rates:
            for _ in range(self.requests or REQUESTS):
                now_s += rng.expovariate(self.rate)
                times.append(now_s)
            return times
        begin_s = 0.0
        for rate, seconds in self.rates:
            now_s = begin_s
            while (now_s := now_s + rng.expovariate(rate)) < begin_s + seconds:
                times.append(now_s)
            begin_s += seconds
        return times


def tree(leaf: int, levels: int, tokens: int) -> list[tuple[str, int]]:
    """Returns the path to a leaf of Fig. 3.7's tree. Level i has 2^i branches and a quarter of the tokens; the last
    level has the remaining tokens."""
    part = tokens // 4
    sizes = [part] * (levels - 1) + [tokens - part * (levels - 1)]
    return [(f"{level}: {leaf >> (levels - 1 - level)}", size) for level, size in enumerate(sizes)]


class LoadSample(NamedTuple):
    """Means and state of the last :data:`SAMPLE_S` seconds."""

    time_s: float
    tokens_s: float
    """The tokens decoded per second of decoding."""
    batch: float
    homogeneity: float
    """The share of the current batch's prompts that the whole batch shares."""
    batches: int
    """The number of batches of the round."""


class FeatherServed(NamedTuple):
    tokens_s: float
    batch: float
    """The mean number of requests in a decoding step."""
    tbt_s: float
    """The mean time between two of a request's tokens, including the wait for a place in the batch."""
    ttft_s: float
    """The median."""
    evicted: int
    """The number of blocks evicted."""
    computed: float
    """The share of all prompts' tokens that no cache held."""
    seconds: float
    step_s: float
    """The mean time of a decoding step, without waits for the scheduler."""
    stalled: float
    """The share of the time in which the engine waits for its scheduler."""
    read_s: float
    """The time to read decoding's weights and KV, as the profile counts it, at full memory bandwidth."""
    computing: float
    """The share of the time that all computed tokens, of prompts and answers, would take at the speed of prompts."""
    samples: tuple[LoadSample, ...]

    @property
    def reading(self) -> float:
        """The share of the time in which memory is read."""
        return self.read_s / self.seconds


def _sampled(cluster: SimCluster) -> list[LoadSample]:
    """Returns the samples that a run will take until all requests have ended."""
    taken: list[LoadSample] = []

    def take(steps: int, tokens: int, seconds: float) -> None:
        (engine,) = cluster.members.engines.values()
        sums, formed = engine.decode_sums, engine.steps.formed
        if sums.steps > steps:
            decoded = sums.tokens - tokens
            rates = decoded / (sums.seconds - seconds), decoded / (sums.steps - steps)
            taken.append(LoadSample(cluster.time.now_s, *rates, formed.homogeneity, formed.batches))
        if not cluster.front.over:
            cluster.time.after(SAMPLE_S, partial(take, sums.steps, sums.tokens, sums.seconds))

    cluster.time.after(SAMPLE_S, partial(take, 0, 0, 0.0))
    return taken


def served(load: FeatherLoad, server: FeatherServer, tell: Tell) -> FeatherServed:
    """Runs a load on a server, or returns the cached result of the same run."""
    load = replace(load, requests=load.requests or REQUESTS)
    tell(f"{load.rate:g}/s, {load.groups} groups: {label(server.policy)} on {server.machine}")
    return _served(load, server)


@lru_cache(maxsize=512)
def _served(load: FeatherLoad, server: FeatherServer) -> FeatherServed:
    cluster = server.cluster()
    samples = _sampled(cluster)
    outcomes = cluster.run(load.arrivals())
    assert all(each.end == FINISHED for each in outcomes)
    (engine,) = cluster.members.engines.values()
    sums, profile = engine.decode_sums, load_profile(load_machine(server.machine).engine)
    seconds = max(each.arrived_s + each.e2e_s for each in outcomes) - outcomes[0].arrived_s
    return FeatherServed(
        sum(each.output_tokens for each in outcomes) / seconds,
        sums.tokens / max(1, sums.steps),
        sum(map(_between, outcomes)) / len(outcomes),
        sorted(each.ttft_s for each in outcomes)[len(outcomes) // 2],
        cluster.evicted,
        1.0 - sum(each.hit_tokens for each in outcomes) / sum(each.tokens for each in outcomes),
        seconds,
        sums.seconds / max(1, sums.steps),
        engine.stalled_s / seconds,
        sums.steps * profile.decode_step_s + sums.kv_tokens * profile.decode_kv_token_s,
        (engine.prompt_tokens + sums.tokens) * profile.prefill_token_s / seconds,
        tuple(samples),
    )


def _between(outcome: RequestOutcome) -> float:
    """Returns the mean time between two tokens of a request."""
    return (outcome.e2e_s - outcome.ttft_s) / max(1, outcome.output_tokens - 1)
