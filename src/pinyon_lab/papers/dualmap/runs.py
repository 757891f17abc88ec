"""Simulated runs of DualMap's testbed: eight instances with one NPU each (§4.1, A.3.1)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

from pinyon.core.request import Role
from pinyon.placement.policies import PLACEMENT_POLICIES
from pinyon.profiles.engine_profile import load_profile
from pinyon.profiles.machine_profile import load_machine
from pinyon_lab.figures.figure import Tell
from pinyon_lab.figures.workload import Workload
from pinyon_lab.simulator.cluster import SimCluster
from pinyon_lab.simulator.cluster_settings import ClusterSettings, StepRule
from pinyon_lab.simulator.models import ReferenceModel
from pinyon_lab.simulator.prefill_reference import ReferenceSettings
from pinyon_lab.simulator.report import cluster_report, report
from pinyon_lab.simulator.workload import Arrival, at_rate, cut

PAPER = "DualMap"
INSTANCES = 8
SLO_S = 5.0
WARM_UP = 500
REQUESTS = {"conversation": 4_000, "toolagent": 8_000}
"""The number of requests from the start of each trace (A.3.1); the first 500 do not count."""
MACHINES = {"7B": "910b-qwen2.5-7b", "14B": "910b-qwen2.5-14b"}
TOKENS_MAX = {"7B": 20_480, "14B": 10_240}
"""The tokens at which a prompt is cut (A.3.1)."""
CACHE_TOKENS = {"7B": 1_000_000, "14B": 500_000}
"""The tokens that each instance caches, in HBM and below it (§4.1)."""
ACTIVE_PREFILLS = 2
"""Our choice: one prompt is computed while the cached KV of the next is loaded. Requests that wait behind them can move
(§3.3). The paper does not say how many requests the authors' scheduler hands to an instance."""
DUALMAP = "dualmap"
POLICIES = ("cache_affinity", "least_loaded", "min_ttft", "preble", DUALMAP)
HASHED = ("cache_affinity", DUALMAP)
"""The policies whose hashes depend on a seed."""
SEEDS = 5
PREFILL_ONLY, DECODING = "prefill only", "with decoding"
SAMPLE_S = 10.0
SHARE = 0.9
"""The attainment that goodput requires (§4.1)."""

MODEL_NOTE = (
    "Modelled: with decoding, a whole instance by the profiles of docs/design/simulator.md (`--model 910b-qwen2.5-7b`, "
    "prompts before decoding, since the authors run vLLM, A.8; at most two have left the queue, the others may move); "
    "prefill only, the plain reference with 127 µs per token of the authors' published code, which no 14B model has, "
    "and where Preble goes by load alone if no prefix is long (`combined=false`). Rates at which systems fill up are "
    "the model's; what is compared are policies."
)
SEEDS_NOTE = f"Hashed policies: mean of {SEEDS} seeds."
ONE_SEED_NOTE = "Hashed policies: one seed."


@dataclass(frozen=True, slots=True)
class DualMapLoad:
    """A workload as DualMap sends it."""

    workload: str
    size: str
    block_tokens: int
    arrivals: tuple[Arrival, ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class DualMapSystem:
    """A system to simulate; ``kind`` is ``PREFILL_ONLY`` or ``DECODING``."""

    kind: str
    policy: str
    instances: int = INSTANCES
    seed: int = 0

    def placement(self) -> str:
        choice = PLACEMENT_POLICIES.with_default(self.policy, "seed", self.seed)
        return PLACEMENT_POLICIES.with_default(choice, "slo_s", SLO_S)


Samples = Sequence[tuple[float, tuple[int, ...]]]
"""The tokens that each instance has still to compute, and when."""


class DualMapResults(NamedTuple):
    """The means of the requests that count, in seconds and shares; with decoding, also samples of every ten seconds."""

    means: Mapping[str, float]
    samples: Samples = ()


def _cv(loads: Sequence[int]) -> float:
    mean = sum(loads) / len(loads)
    return math.sqrt(sum((each - mean) ** 2 for each in loads) / len(loads)) / mean


def _pending(cluster: SimCluster, arrivals: Sequence[Arrival]) -> Samples:
    """Returns samples that a run will take of the prompt tokens that each instance has still to compute (Eq. 1).

    They are taken every ten seconds from the first arrival that counts to the last one."""
    taken: list[tuple[float, tuple[int, ...]]] = []

    def take() -> None:
        now_s, members = cluster.time.now_s, cluster.members
        if now_s > arrivals[-1].time_s:
            return
        waiting = dict.fromkeys(sorted(each.boot for each in members.engines.values()), 0)
        for request in cluster.front.requests.values():
            attempt = request.attempt
            if attempt is None or attempt.computed or attempt.prefill not in waiting:
                continue
            if attempt.job_room is not None:  # the length of its reused prefix is known
                left = members.boots[attempt.prefill].prompts.left(attempt.job)
            else:
                left = attempt.tokens - attempt.decision.local_blocks * cluster.settings.block_tokens
            waiting[attempt.prefill] += max(0, left)
        taken.append((now_s, tuple(waiting.values())))
        cluster.time.after(SAMPLE_S, take)

    cluster.time.at(arrivals[min(WARM_UP, len(arrivals) - 1)].time_s, take)
    return taken


def load_of(workload: Workload, size: str, requests: int = 0) -> DualMapLoad:
    """Returns the load of the first ``requests`` requests, or of as many as A.3.1 has if 0."""
    count = requests or REQUESTS[workload.name]
    arrivals = cut(workload.rows[:count], workload.block_tokens, TOKENS_MAX[size])
    return DualMapLoad(workload.name, size, workload.block_tokens, tuple(arrivals))


def ran(load: DualMapLoad, system: DualMapSystem, rate: float, tell: Tell) -> DualMapResults:
    """Runs a load on a system at ``rate`` requests/s, or returns the cached result of the same run."""
    text = f"{load.workload}, {load.size}, {system.kind}: {system.policy} at {rate:g}/s"
    tell(text if system.seed == 0 else f"{text}, seed {system.seed}")
    return _ran(load, system, rate)


@lru_cache(maxsize=2048)
def _ran(load: DualMapLoad, system: DualMapSystem, rate: float) -> DualMapResults:
    arrivals = at_rate(load.arrivals, rate)
    if system.kind == PREFILL_ONLY:
        choice = PLACEMENT_POLICIES.with_default(system.placement(), "combined", False)
        tokens = CACHE_TOKENS[load.size]
        settings = ReferenceSettings(system.instances, tokens, load.block_tokens, SLO_S, seed=system.seed)
        served = ReferenceModel(settings, choice, "fifo").run(arrivals, lambda done: None)
        return DualMapResults(_means(report(served, SLO_S, WARM_UP)))
    cluster = cluster_of(load, system)
    samples = _pending(cluster, arrivals)
    outcomes = cluster.run(arrivals)
    e2e = sorted(each.e2e_s for each in outcomes[WARM_UP:])
    means = _means(cluster_report(outcomes, SLO_S, SLO_S, WARM_UP))
    # the CV of §2.2, Eq. 1: the mean over the samples in which any instance has waiting tokens
    unlike = [_cv(loads) for _, loads in samples if any(loads)]
    means["cv"] = sum(unlike) / max(1, len(unlike))
    means["pending"] = sum(sum(loads) / len(loads) for _, loads in samples) / max(1, len(samples))
    means |= {"e2e_p50_s": e2e[len(e2e) // 2], "e2e_p90_s": e2e[9 * len(e2e) // 10]}
    return DualMapResults(means, samples)


def _means(told: Mapping[str, float]) -> dict[str, float]:
    of_some = {key: told[f"attainment_{key}"] for key in ("last_quarter", "longest_tenth")}
    alike = {key: told[key] for key in ("attainment", "p50_s", "p90_s", "p99_s")}
    return {**alike, **of_some, "hits": told["hit_ratio"], "e2e_p50_s": -1.0, "e2e_p90_s": -1.0}


def cluster_of(load: DualMapLoad, system: DualMapSystem, **changes: Any) -> SimCluster:
    """Returns the simulated cluster of a system; ``changes`` replace fields of its settings."""
    machine = load_machine(MACHINES[load.size])
    settings = ClusterSettings(
        (Role.MIXED,) * system.instances,
        load.block_tokens,
        machine.hbm_tokens,
        CACHE_TOKENS[load.size] - machine.hbm_tokens,
        step_rule=StepRule.PREFILL_FIRST,
        active_prefills=ACTIVE_PREFILLS,
        batching="fcfs",
        service_order="fifo",
        slo_s=SLO_S,
    )
    policy = PLACEMENT_POLICIES.make(system.placement())
    return SimCluster(replace(settings, **changes), machine, load_profile(machine.engine), policy, system.seed)


def goodput(points: Sequence[tuple[float, float]]) -> float:
    """Returns the rate at which attainment falls below ``SHARE``, between ``points``, ``(rate, attainment)`` in order;
    the last rate if it never does, 0 if the first is below already."""
    if points[0][1] < SHARE:
        return 0.0
    for (low, above), (rate, attainment) in pairwise(points):
        if attainment < SHARE:
            return low + (rate - low) * (above - SHARE) / (above - attainment)
    return points[-1][0]


def all_seeds(
    load: DualMapLoad, kind: str, policy: str, rate: float, tell: Tell, instances: int = INSTANCES
) -> list[DualMapResults]:
    """Runs a load once for each seed of the policy."""
    seeds = SEEDS if policy.partition(":")[0] in HASHED else 1
    return [ran(load, DualMapSystem(kind, policy, instances, seed), rate, tell) for seed in range(seeds)]


def mean(runs: Sequence[DualMapResults], key: str) -> float:
    return sum(run.means[key] for run in runs) / len(runs)


def means(runs: Sequence[DualMapResults], *keys: str) -> list[float]:
    return [mean(runs, key) for key in keys]


def label(policy: str) -> str:
    """Returns a policy's name for pictures."""
    return policy.replace("_", " ")
