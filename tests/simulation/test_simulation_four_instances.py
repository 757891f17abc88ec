"""The modules that production runs, on a virtual clock without an event loop.

Four instances serve thousands of requests (10,000 in long runs). Requests are cancelled in any phase, steps fail,
readers forget their leases, instances die and come back under their names. Every request ends once, nothing is left
anywhere, and one seed gives one history."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pinyon.core.request import Role
from pinyon.decisions import replay_journal
from tests.long import usually
from tests.simulation.worlds import SMALL, Plan, World, played, random_plan

DEATHS = usually(20, long=40)
MIXED = Plan(requests_per_s=300.0, requests=usually(2_000, long=10_000), deaths=DEATHS)
SPLIT = Plan(
    replace(SMALL, roles=(Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE)),
    requests=usually(1_000, long=10_000),
    deaths=DEATHS,
)
TIGHT = Plan(
    replace(SMALL, hbm_tokens=40 * SMALL.block_tokens, front_slots=32, front_queue=16),
    requests=600,
    deaths=12,
    cancelled=0.4,
)
WORLDS = usually(100, long=20_000)
PARTS = 4


@pytest.fixture(scope="module")
def mixed() -> World:
    return played(MIXED, seed=1)


@pytest.fixture(scope="module")
def split() -> World:
    return played(SPLIT, seed=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixed", "split"])
def test_thousands_of_requests_end_once_and_leave_nothing(name: str, request: pytest.FixtureRequest) -> None:
    world: World = request.getfixturevalue(name)
    ends = ("finished", "cancelled", "failed", "refused", "rejected", "unavailable")
    assert sum(world.counts[end] for end in ends) == world.plan.requests
    # The history is worth something only if all of this happened.
    met = ("finished", "cancelled", "refused", "retry", "death", "preempted")
    assert {what: world.counts[what] for what in met if not world.counts[what]} == {}
    assert world.cluster.moves.fetches
    assert world.cluster.evicted
    assert world.counts["finished"] > world.plan.requests / 2


@pytest.mark.slow
def test_a_seed_is_a_history() -> None:
    plan = replace(MIXED, requests=usually(500, long=1_000))
    first, same = played(plan, seed=1), played(plan, seed=1)
    assert (first.digest, first.counts, first.outcomes) == (same.digest, same.counts, same.outcomes)
    assert played(TIGHT, seed=7).digest != played(TIGHT, seed=8).digest


def test_what_was_decided_is_decided_again_from_the_journals() -> None:
    """The queue and each boot of an instance, dead ones included, have a journal."""
    world = played(replace(TIGHT, journals=True), seed=9)
    assert len(world.journals) > 1 + len(TIGHT.settings.roles)
    for name, lines in world.journals.items():
        seen = replay_journal(lines)
        assert (seen.calls, seen.differences) == (len(lines) - 1, []), name
    long = [lines for name, lines in world.journals.items() if name != "lb" and len(lines) > 1000]
    assert long
    fifo = ([lru[0].replace('"eviction":"lru"', '"eviction":"fifo"'), *lru[1:]] for lru in long)
    assert any(replay_journal(lines).different for lines in fifo), "another policy decides the same of everything"


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_request_of_many_random_worlds_ends_once(part: int) -> None:
    for seed in range(part, WORLDS, PARTS):
        world = World(random_plan(seed), seed)
        try:
            world.run()
            world.check()
        except BaseException:
            print(f"seed {seed}: {world.plan}")
            raise
