"""The known instances, how long they stay known and who owns an instance id, on the test's clock."""

from __future__ import annotations

import asyncio

import pytest

from pinyon.core.errors import FailedPrecondition
from pinyon.core.request import Role
from pinyon.placement.fleet import Fleet
from pinyon.placement.kvcache_centric import KvCacheCentric
from pinyon.placement.policy import PlacementRequest
from pinyon.placement.scheduler import Scheduler
from services.conductor.membership import DISPLACED_MAX, Membership
from tests.unit.placement.conftest import info, make_fleet

LEASE_S = 3.0


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def fleet() -> Fleet:
    return make_fleet()


@pytest.fixture
def membership(fleet, clock) -> Membership:
    return Membership(fleet, clock, LEASE_S, settle_s=2.0)


async def test_a_conductor_that_has_just_started_says_so(fleet, membership, clock):
    assert fleet.settling
    membership.open(info("p0", Role.PREFILL))
    clock.now_s += 1.9
    membership.expire()
    assert fleet.settling
    version = fleet.version
    waiting = asyncio.ensure_future(membership.wait_change(version))
    await asyncio.sleep(0)
    clock.now_s += 0.1
    membership.expire()
    assert not fleet.settling
    async with asyncio.timeout(60):
        await waiting
    assert fleet.version > version, "load balancers hear that the list is complete"


def test_a_new_session_of_one_boot_claims_its_placements_anew(clock):
    fleet = make_fleet()
    membership = Membership(fleet, clock, LEASE_S, settle_s=0.0)
    reporter = membership.open(info("x0", Role.MIXED))
    scheduler = Scheduler(fleet, KvCacheCentric())
    for name in ("ended", "runs"):
        scheduler.schedule(PlacementRequest(name, "m", 10), clock.now_s)
        fleet.inflight.begin_decode(name, reporter.state)
    membership.close(reporter)
    assert membership.open(info("x0", Role.MIXED)).state is reporter.state
    fleet.inflight.begin_decode("runs", reporter.state)
    fleet.inflight.expire(clock.now_s + 10.0)
    assert (reporter.state.inflight_decodes, fleet.inflight.prefills) == (1, 1)


def test_with_no_time_to_settle_it_never_does(clock):
    fleet = make_fleet()
    Membership(fleet, clock, LEASE_S, settle_s=0.0)
    assert not fleet.settling


def test_time_in_which_the_conductor_stood_still_ends_no_lease(fleet, membership, clock):
    for name in ("p0", "p1"):
        membership.open(info(name, Role.PREFILL))
    clock.now_s += 2.5
    membership.stood_still(2.0)
    assert membership.report_age_s("p0") == 0.5
    clock.now_s += 2.4
    assert membership.expire() == []
    clock.now_s += 0.2
    assert membership.expire() == ["p0", "p1"]


def test_after_a_long_standstill_it_settles_again(fleet, membership, clock):
    membership.open(info("p0", Role.PREFILL))
    clock.now_s += 2.0
    membership.expire()
    assert not fleet.settling
    clock.now_s += 30.0
    membership.stood_still(29.5)
    assert fleet.settling
    assert membership.expire() == []
    clock.now_s += 2.0
    assert membership.expire() == ["p0"], "it had time to come back"
    assert not fleet.settling


def test_of_two_processes_with_one_id_the_later_one_has_it(fleet, membership):
    first, second = (info("p0", Role.PREFILL, boot=boot, address=f"{boot}:1") for boot in ("a", "b"))
    lost = membership.open(first)
    held = membership.open(second)
    with pytest.raises(FailedPrecondition):
        membership.heard(lost)
    membership.close(lost)
    for _ in range(3):  # it dials again and again
        with pytest.raises(FailedPrecondition, match="at b:1 that started later"):
            membership.open(first)
    membership.heard(held)
    assert fleet.get("p0") is held.state
    assert held.state.connected


def test_the_later_one_keeps_it_when_it_connects_again(fleet, membership):
    first, second = (info("p0", Role.PREFILL, boot=boot) for boot in ("a", "b"))
    membership.open(first)
    membership.close(membership.open(second))
    with pytest.raises(FailedPrecondition):
        membership.open(first)
    again = membership.open(second)
    with pytest.raises(FailedPrecondition):
        membership.open(first)
    membership.heard(again)


def test_the_end_of_an_earlier_session_disconnects_nobody(fleet, membership):
    first = membership.open(info("p0", Role.PREFILL))
    again = membership.open(info("p0", Role.PREFILL))
    membership.close(first)  # its break is noticed only now
    assert fleet.get("p0") is again.state
    assert again.state.connected
    membership.close(again)
    assert not again.state.connected


@pytest.mark.parametrize("end", ["leaves", "lease ends"])
def test_when_the_later_one_is_gone_the_other_may_have_it(membership, clock, end):
    first, second = (info("p0", Role.PREFILL, boot=boot) for boot in ("a", "b"))
    membership.open(first)
    held = membership.open(second)
    if end == "leaves":
        membership.leave(held)
    else:
        clock.now_s += LEASE_S + 0.1
        assert membership.expire() == ["p0"]
    membership.heard(membership.open(first))


def test_any_number_of_restarts_takes_bounded_memory(membership):
    for boot in range(3 * DISPLACED_MAX):
        reporter = membership.open(info("p0", Role.PREFILL, boot=str(boot)))
    assert len(reporter.displaced) == DISPLACED_MAX
    with pytest.raises(FailedPrecondition):
        membership.open(info("p0", Role.PREFILL, boot=str(3 * DISPLACED_MAX - 2)))
