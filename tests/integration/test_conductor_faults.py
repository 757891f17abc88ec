"""Faults of one peer, or of the conductor itself, and their effect on the others."""

from __future__ import annotations

import pytest

from pinyon.api.conductor.v1 import conductor_pb2
from pinyon.core.errors import DeadlineExceeded, FailedPrecondition, Unavailable
from services.conductor import servicer, sessions
from tests.integration.conductor_parts import PREFILL, WAIT_S, LoadBalancer, Reporter, World, ask, failure


async def test_a_restarted_conductor_says_that_its_list_is_incomplete():
    async with World(settle_ms=3000) as world:
        members = await world.cluster()
        lb = LoadBalancer(world.stub)
        assert (await lb.open()).incomplete
        world.now_s += 3.0
        for member in members.values():
            await member.report()
        world.conductor.sweep()
        assert len((await lb.list_where(lambda listed: True)).instances) == 4

        await world.restart()
        lb = LoadBalancer(world.stub)
        listed = await lb.open()
        assert listed.incomplete
        assert not listed.instances
        answer = (await lb.place(ask("early")))["early"]
        assert (answer.error.code, answer.error.retry_after_ms > 0) == ("UNAVAILABLE", True)
        await members["p0"].connect()
        await members["d0"].connect()
        assert (await lb.list_where(lambda listed: len(listed) == 2)).incomplete
        assert (await lb.place(ask("next")))["next"].HasField("placement"), "with those it knows"
        assert isinstance(await failure(world.stub.Schedule(ask("unknown", model="other"))), Unavailable)
        world.now_s += 2.9
        for name in ("p0", "d0"):
            await members[name].report()
        world.conductor.sweep()
        world.now_s += 0.1
        world.conductor.sweep()
        assert not (await lb.list_where(lambda listed: True)).incomplete
        assert world.metric("settling") == 0


@pytest.mark.parametrize("method", ["ReportSession", "ScheduleSession"])
async def test_a_session_in_which_nothing_is_said_ends(world, monkeypatch, method):
    monkeypatch.setattr(servicer, "FIRST_S", 0.01)
    call = getattr(world.stub, method)(timeout=WAIT_S)
    await call.wait_for_connection()

    async def to_its_end() -> None:
        while True:
            await call.read()

    assert isinstance(await failure(to_its_end()), DeadlineExceeded)
    assert world.metric("lb_sessions") == 0


async def test_a_message_of_many_requests_is_answered_in_turns(world):
    await world.cluster()
    lb = await world.balancer()
    requests = [ask(f"r{number}", blocks=1) for number in range(5 * sessions.REQUESTS_PER_TURN)]
    await lb.place(*requests, released=[f"unknown{number}" for number in range(10_000)])
    assert world.metric("inflight_placements") == len(requests)


async def test_a_second_process_with_the_same_id_is_told(world):
    members = await world.cluster()
    later = Reporter(world.stub, "p0", PREFILL, boot="2")
    await later.connect()
    lost = members["p0"]
    refused = await failure(lost.report(stored=(1,)))
    assert isinstance(refused, FailedPrecondition)
    refused = await failure(lost.connect())
    assert (type(refused), refused.field) == (FailedPrecondition, "registration.instance_id")
    assert "an id of its own" in str(refused)
    await later.report(stored=(1,))
    assert await world.holders(1) == {"p0": 1}


async def test_a_bad_first_report_leaves_no_session_behind(world):
    lost = Reporter(world.stub, "p0", PREFILL)
    lb = await world.balancer()
    call = world.stub.ReportSession(timeout=WAIT_S)
    await call.write(
        conductor_pb2.ReportSessionRequest(
            registration=lost.info, snapshot=conductor_pb2.CacheSnapshot(keys=b"odd", first=True)
        )
    )
    assert await failure(call.read())
    await lb.list_where(lambda listed: listed and not listed["p0"].schedulable)
    assert world.metric("report_sessions") == 0
    world.now_s += 3.1
    world.conductor.sweep()
    assert await world.names() == {}
    await lost.connect()
    assert list(await world.names()) == ["p0"]
