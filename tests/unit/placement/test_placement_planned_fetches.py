"""The reported fetches that are believed, and the bounds of what is remembered for it."""

from __future__ import annotations

import pytest

from pinyon.core.key_sample import EVERY_MAX
from pinyon.placement.planned_fetches import PAIR_MAX, PlannedFetches
from pinyon.placement.policy import Fetch, PlacementDecision
from tests.unit.placement.conftest import DECODE, LAYOUT, PREFILL, STORE, make_fleet, member

BLOCK = LAYOUT.block_bytes


@pytest.fixture
def fleet():
    return make_fleet(("p0", PREFILL), ("p1", PREFILL), ("s0", STORE), ("s1", STORE), ("d0", DECODE))


def placed(fleet, reader: str, **blocks: int) -> PlacementDecision:
    fetches, first = [], 0
    for source, count in blocks.items():
        fetches.append(Fetch(member(fleet, source), first, count))
        first += count
    return PlacementDecision(
        member(fleet, reader), member(fleet, "d0"), 0, tuple(fetches), transfer_s=1.0, prefill_s=1.0
    )


def test_each_span_is_believed_once_and_of_its_reader_alone(fleet):
    planned = PlannedFetches(100, 10.0)
    planned.plan(placed(fleet, "p0", s0=4, s1=2), 0.0)
    p0, p1, s0, s1 = (member(fleet, name) for name in ("p0", "p1", "s0", "s1"))
    assert not planned.came(p1, s0, BLOCK, 1.0)
    assert not planned.came(s0, p0, BLOCK, 1.0)
    assert planned.came(p0, s1, 2 * BLOCK, 1.0)
    assert planned.came(p0, s0, 4 * BLOCK, 1.0)
    assert not planned.came(p0, s0, 4 * BLOCK, 1.0)
    assert len(planned) == 0


def test_a_span_may_come_with_the_first_blocks_of_the_next(fleet):
    planned, p0, s0 = PlannedFetches(100, 10.0), member(fleet, "p0"), member(fleet, "s0")
    planned.plan(placed(fleet, "p0", s0=4), 0.0)
    assert not planned.came(p0, s0, (4 + EVERY_MAX) * BLOCK, 1.0)
    assert planned.came(p0, s0, (4 + EVERY_MAX - 1) * BLOCK, 1.0)


@pytest.mark.parametrize("planned_blocks", [(1, 1000), (1000, 1)])
def test_a_large_fetch_leaves_the_plan_of_a_small_one(fleet, planned_blocks):
    planned, p0, s0 = PlannedFetches(100, 10.0), member(fleet, "p0"), member(fleet, "s0")
    for blocks in planned_blocks:
        planned.plan(placed(fleet, "p0", s0=blocks), 0.0)
    assert planned.came(p0, s0, 1000 * BLOCK, 1.0)
    assert not planned.came(p0, s0, 1000 * BLOCK, 1.0)
    assert planned.came(p0, s0, BLOCK, 1.0)


def test_a_small_fetch_leaves_the_plan_of_a_large_one(fleet):
    """Prompts overtake each other, and large reads tell most about speed."""
    planned, p0, s0 = PlannedFetches(100, 10.0), member(fleet, "p0"), member(fleet, "s0")
    for blocks in (1000, 1):
        planned.plan(placed(fleet, "p0", s0=blocks), 0.0)
    assert planned.came(p0, s0, BLOCK, 1.0)
    assert planned.came(p0, s0, 1000 * BLOCK, 1.0)


def test_plans_end(fleet):
    planned, p0, s0, s1 = PlannedFetches(100, 10.0), *(member(fleet, name) for name in ("p0", "s0", "s1"))
    planned.plan(placed(fleet, "p0", s0=1), 0.0)
    planned.plan(placed(fleet, "p0", s1=1), 5.0)
    planned.expire(10.0)
    assert len(planned) == 2
    assert not planned.came(p0, s0, BLOCK, 10.1)
    planned.expire(10.1)
    assert len(planned) == 1
    assert planned.came(p0, s1, BLOCK, 10.1)


def test_so_many_are_known(fleet):
    planned, p0, s0, s1 = PlannedFetches(300, 10.0), *(member(fleet, name) for name in ("p0", "s0", "s1"))
    for number in range(2 * PAIR_MAX):
        planned.plan(placed(fleet, "p0", s0=1), float(number) * 1e-3)
    assert len(planned) == PAIR_MAX
    for _ in range(100):
        planned.plan(placed(fleet, "p0", s1=1), 1.0)
    assert len(planned) == 100, "the pair that nothing was planned for longest has gone"
    assert not planned.came(p0, s0, BLOCK, 1.0)
    assert planned.came(p0, s1, BLOCK, 1.0)
