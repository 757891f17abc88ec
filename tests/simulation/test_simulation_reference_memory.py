"""The plain reference's pool against a pool kept in a list."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pinyon.batching.service_order import FifoOrder
from pinyon.eviction import Traits
from pinyon.placement.policies import PLACEMENT_POLICIES
from pinyon_lab.simulator.prefill_reference import PrefillReference, ReferenceSettings
from pinyon_lab.simulator.reference_memory import PoolRules
from pinyon_lab.simulator.workload import Arrival
from tests.simulation.leftovers import check_reference

BLOCK = 512


class Plain:
    """The pool of one instance, as lists with the least recently used block in front."""

    def __init__(self, dram: int, ssd: int) -> None:
        self.limits = dram, ssd
        self.dram: list[int] = []
        self.ssd: list[int] = []

    def use(self, blocks: list[int]) -> None:
        """Uses the blocks of one prompt; deeper blocks count as used earlier."""
        for block in reversed(blocks):
            for tier in (self.dram, self.ssd):
                if block in tier:
                    tier.remove(block)
            self.dram.append(block)
        while len(self.dram) > self.limits[0]:
            self.ssd.append(self.dram.pop(0))
        while len(self.ssd) > self.limits[1]:
            self.ssd.pop(0)


def arrivals_of(rng: Random, count: int) -> list[Arrival]:
    """Returns prompts that share beginnings, so far apart that each ends before the next comes."""
    arrivals = []
    for number in range(count):
        family = rng.randrange(4)
        blocks = [family * 100 + depth for depth in range(rng.randrange(1, 6))]
        if rng.random() < 0.5:
            blocks.append(10_000 + number)
        arrivals.append(Arrival(number * 10.0, len(blocks) * BLOCK, 1, tuple(blocks), Traits()))
    return arrivals


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 32), st.sampled_from((0, 5, 30)), st.integers(6, 20))
def test_hits_and_times_are_those_of_lists(seed: int, ssd: int, dram: int) -> None:
    rng = Random(seed)
    arrivals = arrivals_of(rng, 60)
    rules = PoolRules(10.0, 20.0, ssd)
    reference = ReferenceSettings(3, dram * BLOCK, BLOCK, pool=rules, token_us=100.0)
    cluster = PrefillReference(reference, PLACEMENT_POLICIES.make("round_robin"), FifoOrder)
    served = cluster.run(arrivals)
    check_reference(cluster)
    parts = [Plain(dram, ssd) for _ in range(3)]
    for arrival, row in zip(arrivals, served, strict=True):
        mine = parts[row.instance]
        hit, moving_us, read = 0, 0.0, {}
        for block in arrival.blocks:
            part = next((each for each in parts if block in (*each.dram, *each.ssd)), None)
            if part is None:
                break
            hit += 1
            moving_us += (10.0 if part is not mine else 0.0) + (20.0 if block in part.ssd else 0.0)
            read.setdefault(id(part), (part, []))[1].append(block)
        for part, blocks in read.values():
            if part is not mine:
                part.use(blocks)
        held = [block for each in parts if each is not mine for block in (*each.dram, *each.ssd)]
        mine.use([block for block in arrival.blocks if block not in held])
        hit_tokens = min(hit * BLOCK, arrival.tokens - 1)
        assert row.hit_tokens == hit_tokens
        expected_s = ((arrival.tokens - hit_tokens) * 100.0 + moving_us * BLOCK) * 1e-6
        assert row.ttft_s == pytest.approx(expected_s, abs=1e-9)


def test_a_block_is_kept_once() -> None:
    rng = Random(7)
    reference = ReferenceSettings(4, 1_000 * BLOCK, BLOCK, pool=PoolRules(4.6))
    cluster = PrefillReference(reference, PLACEMENT_POLICIES.make("round_robin"), FifoOrder)
    arrivals = arrivals_of(rng, 100)
    cluster.run(arrivals)
    held = [block for each in cluster._instances for block in each.cache.cache.resident]
    assert len(held) == len(set(held)) == len({block for each in arrivals for block in each.blocks})
