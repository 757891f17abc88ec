"""The cost of one decision of a placement policy, by number of instances, inside a replay of the plain reference.

DualMap's appendix A.4.2 has these operations: querying what is cached (about 0.2 ms for each instance), routing a
request (0.6 ms) and rebalancing two overloaded instances (2.2 to 2.5 ms). The workload is theirs as far as it is known:
tool&agent, generated, at a rate that overloads some instances."""

from __future__ import annotations

import statistics
import time
from itertools import islice
from random import Random
from typing import Any

from bench.report import Aim, Report, parser, percentile, progress
from pinyon.batching.service_order import FifoOrder
from pinyon.placement.instances import InstanceState
from pinyon.placement.policies import PLACEMENT_POLICIES
from pinyon.placement.policy import Move, PlacementDecision, PlacementRequest, Pool, Waiting
from pinyon.placement.prefix_match import PrefixMatch
from pinyon.placement.scheduler import Scheduler
from pinyon_lab.simulator.prefill_reference import PrefillReference, ReferenceSettings
from pinyon_lab.simulator.workload import at_rate, cut
from pinyon_lab.traces import FORMATS
from pinyon_lab.traces.generate import generate, profile

POLICIES = ("dualmap", "min_ttft", "kvcache_centric", "preble", "least_loaded", "cache_affinity")
RATE_EACH = 3.0
"""Requests per second and instance."""
CACHE_TOKENS = 1_000_000
PRINTED_US = {"query": 200.0, "route": 600.0, "rebalance": 2200.0}
"""The printed times in µs (DualMap A.4.2)."""


class Timed:
    """A policy whose times are taken: of each placement, and of moves where it moved something."""

    def __init__(self, policy: Any) -> None:
        self.name = policy.name
        self._policy = policy
        self.placing_us: list[float] = []
        self.moving_us: list[float] = []
        if hasattr(policy, "moves"):
            self.moves = self._moves

    def place(
        self, request: PlacementRequest, pool: Pool, match: PrefixMatch, now_s: float, rng: Random
    ) -> PlacementDecision:
        began = time.perf_counter_ns()
        decision: PlacementDecision = self._policy.place(request, pool, match, now_s, rng)
        self.placing_us.append((time.perf_counter_ns() - began) / 1e3)
        return decision

    def _moves(self, request: PlacementRequest, decision: PlacementDecision, waiting: Waiting) -> list[Move]:
        looked = False

        def seen(state: InstanceState) -> Any:
            nonlocal looked
            looked = True
            return waiting.at(state)

        watched = Waiting(waiting.pool, seen, waiting.match, waiting.now_s)
        began = time.perf_counter_ns()
        moves: list[Move] = self._policy.moves(request, decision, watched)
        if looked and moves:
            self.moving_us.append((time.perf_counter_ns() - began) / 1e3)
        return moves


def main() -> None:
    options = parser(__doc__)
    arguments = options.parse_args()
    each = 150 if arguments.quick else 700
    sizes = (8, 32) if arguments.quick else (8, 16, 32)
    report = Report("dualmap", {"requests_each": each, "rate_each": RATE_EACH, "seed": arguments.seed})
    made = profile("toolagent")
    block_tokens = FORMATS[made.format].block_tokens
    rows = list(islice(generate(made, arguments.seed), each * sizes[-1]))
    for size in sizes:
        arrivals = at_rate(cut(rows[: each * size], block_tokens, 20_480), RATE_EACH * size)
        for choice in POLICIES:
            figures = _measure(choice, size, block_tokens, arrivals)
            report.results[f"{choice}, {size} instances"] = figures
            progress(f"{choice}, {size} instances: {figures}")
    for size in sizes:
        own = report.results[f"dualmap, {size} instances"]
        for key, label in (("query", "what is cached where"), ("route", "routing"), ("rebalance", "rebalancing")):
            measured = own.get(f"{key}_us")
            why = "" if measured is not None else "nothing was moved"
            report.aims.append(Aim(f"dualmap, {size} instances: {label}, µs", PRINTED_US[key], measured, reason=why))
    report.emit()


def _measure(choice: str, size: int, block_tokens: int, arrivals: Any) -> dict[str, float]:
    """Returns medians, and the 99th percentile of routing. ``query`` is finding out, for one request, what each
    instance holds and computes; ``route`` is that and placing the request."""
    policy = Timed(PLACEMENT_POLICIES.make(choice))
    settings = ReferenceSettings(size, CACHE_TOKENS, block_tokens)
    replay = PrefillReference(settings, policy, FifoOrder)
    whole_us = _timed_decide(replay)
    replay.run(arrivals)
    asked = [whole - placing for whole, placing in zip(whole_us, policy.placing_us, strict=True)]
    figures = {
        "query_us": round(statistics.median(asked), 1),
        "route_us": round(statistics.median(whole_us), 1),
        "route_p99_us": round(percentile(whole_us, 99), 1),
    }
    if policy.moving_us:
        figures["rebalance_us"] = round(statistics.median(policy.moving_us), 1)
        figures["rebalanced"] = len(policy.moving_us)
    return figures


def _timed_decide(replay: PrefillReference) -> list[float]:
    """Measures each decision of the replay from now on, and returns the list of µs, which grows."""
    scheduler: Scheduler = replay.scheduler
    decide, taken = scheduler.decide, []

    def timed(request: PlacementRequest, now_s: float) -> PlacementDecision:
        began = time.perf_counter_ns()
        decision = decide(request, now_s)
        taken.append((time.perf_counter_ns() - began) / 1e3)
        return decision

    scheduler.decide = timed  # type: ignore[method-assign]
    return taken


if __name__ == "__main__":
    main()
