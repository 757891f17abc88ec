"""The placement of pinyon with a pool, and the most-in-time order, against a second, plain version of the rules."""

from __future__ import annotations

import math
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pinyon.batching.interface import ServiceOrder
from pinyon.batching.service_order import SERVICE_ORDERS
from pinyon.eviction import Traits
from pinyon.placement.policies import PLACEMENT_POLICIES
from pinyon_lab.simulator.prefill_reference import PrefillReference, ReferenceSettings
from pinyon_lab.simulator.reference_memory import FETCH_US, PoolRules
from pinyon_lab.simulator.workload import Arrival, at_rate, cut
from pinyon_lab.traces import TraceFile
from tests.long import usually
from tests.simulation import plain_pool
from tests.simulation.plain_prefill import BLOCK, Row
from tests.simulation.test_simulation_prefill_reference import CLOSE_S, SHARED, chains


def compare(rows: list[tuple[float, int, tuple[int, ...]]], instances: int, cache: int, order: str) -> None:
    def make() -> ServiceOrder[Any]:
        return SERVICE_ORDERS.make(order)

    arrivals = [Arrival(time_s, tokens, 0, blocks, Traits()) for time_s, tokens, blocks in rows]
    reference = ReferenceSettings(instances, cache, pool=PoolRules(FETCH_US))
    ours = PrefillReference(reference, PLACEMENT_POLICIES.make("pinyon:pair=false"), make).run(arrivals)
    plain = [Row(*row) for row in rows]
    theirs = plain_pool.simulate(plain, instances, cache, in_order=order == "most_in_time")
    for number, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        assert (mine.instance, mine.hit_tokens) == (other.instance, other.hit_tokens), f"request {number}"
        assert math.isclose(mine.ttft_s, other.ttft_s, abs_tol=CLOSE_S), f"request {number}"


def grown(tokens: int) -> int:
    """Rounds up if the last block is sooner computed than fetched: the policy considers fetching all or nothing."""
    return tokens if (tokens - 1) % BLOCK >= 20 else -(-tokens // BLOCK) * BLOCK


@pytest.mark.parametrize("order", ["fifo", "most_in_time"])
@settings(max_examples=usually(15, long=40), deadline=None)
@given(seed=st.integers(0, 1 << 32), instances=st.integers(1, 5), cache_blocks=st.integers(12, 60))
def test_every_row_is_that_of_the_plain_rules(order: str, seed: int, instances: int, cache_blocks: int) -> None:
    rows = [(time_s, grown(tokens), blocks) for time_s, tokens, blocks in chains(Random(seed), 120, 4000)]
    compare(rows, instances, cache_blocks * BLOCK, order)


@pytest.mark.parametrize("cache_tokens", [60_000, 1_000_000])
def test_a_public_trace_row_by_row(cache_tokens: int) -> None:
    path: Path = SHARED / "mooncake_conversation.jsonl.gz"
    if not path.is_file():
        pytest.skip(f"no {path}")
    arrivals = at_rate(cut(TraceFile(path).sorted_rows(usually(400, long=1200)), BLOCK, 20_480), 9.0)
    rows = [(each.time_s, each.tokens, each.blocks) for each in arrivals]
    compare(rows, 8, cache_tokens, "most_in_time")
