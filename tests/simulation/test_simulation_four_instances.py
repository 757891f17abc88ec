"""The modules that production runs, on a virtual clock without an event loop: four instances, 10,000 requests.

Requests are cancelled in any phase, steps fail, readers forget their leases, instances die and come back under their
names. Every request ends once, nothing is left anywhere, and one seed gives one history.
"""

from __future__ import annotations

import pytest

from pinyon.core.request import Role
from pinyon.decisions import replay_journal
from tests.simulation.world import Plan, World

MIXED = Plan(requests_per_s=170.0)
SPLIT = Plan(roles=(Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE))
SMALL = Plan(requests=600, deaths=12, pool_blocks=40, lb_slots=32, lb_queue=16, cancelled=0.4)


def played(plan: Plan, seed: int) -> World:
    print(f"seed {seed}")
    world = World(plan, seed)
    world.run()
    world.check_over()
    return world


@pytest.fixture(scope="module")
def mixed() -> World:
    return played(MIXED, seed=1)


@pytest.fixture(scope="module")
def split() -> World:
    return played(SPLIT, seed=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixed", "split"])
def test_ten_thousand_requests_end_once_and_leave_nothing(name: str, request: pytest.FixtureRequest) -> None:
    world: World = request.getfixturevalue(name)
    plan = world.plan
    ends = ("finished", "cancelled", "failed", "refused", "rejected", "unavailable")
    assert sum(world.counts[end] for end in ends) == plan.requests
    # The history is worth something only if it met all of this.
    met = (
        "finished",
        "cancelled",
        "refused",
        "retry",
        "death",
        "fetched",
        "evicted",
        "queued",
        "expired",
        "duplicates",
        "preempted",
    )
    assert {what: world.counts[what] for what in met if not world.counts[what]} == {}
    assert world.counts["finished"] > plan.requests / 2


@pytest.mark.slow
def test_a_seed_is_a_history(mixed: World) -> None:
    same = played(MIXED, seed=1)
    assert (mixed.digest, mixed.counts) == (same.digest, same.counts)
    assert played(SMALL, seed=7).digest != played(SMALL, seed=8).digest


def test_what_was_decided_is_decided_again_from_the_journals() -> None:
    """One journal for the queue and for each boot of an instance, those that died included."""
    world = played(Plan(**{**vars(SMALL), "journals": True}), seed=9)
    assert len(world.journals) > 1 + len(SMALL.roles)
    for name, lines in world.journals.items():
        seen = replay_journal(lines)
        assert (seen.calls, seen.differences) == (len(lines) - 1, []), name
    long = [lines for name, lines in world.journals.items() if name != "lb" and len(lines) > 1000]
    assert long
    fifo = ([lru[0].replace('"eviction":"lru"', '"eviction":"fifo"'), *lru[1:]] for lru in long)
    assert any(replay_journal(lines).different for lines in fifo), "another policy decides the same of everything"


def test_a_journal_changes_nothing() -> None:
    assert played(Plan(**{**vars(SMALL), "journals": True}), seed=9).digest == played(SMALL, seed=9).digest


@pytest.mark.parametrize("seed", range(20, 30))
def test_small_worlds_under_pressure(seed: int) -> None:
    """Pools that hold a few requests only, four of ten requests cancelled."""
    roles = (Role.MIXED, Role.MIXED, Role.PREFILL, Role.DECODE) if seed % 2 else SMALL.roles
    played(Plan(**{**vars(SMALL), "roles": roles}), seed)
