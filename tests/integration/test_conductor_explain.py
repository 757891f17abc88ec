"""Explanations by the conductor, over the wire; the test plays its instances and load balancers."""

from __future__ import annotations

import pytest

from pinyon.api.conductor.v1 import conductor_pb2
from pinyon.core.errors import FailedPrecondition, InvalidArgument, NotFound
from tests.integration.conductor_parts import DECODE, PREFILL, Reporter, World, ask, failure

UNIQUE = "4a4c72628edc00000002"


async def explained(world: World, request_id: str) -> list[conductor_pb2.ExplainedDecision]:
    return list((await world.stub.Explain(conductor_pb2.ExplainRequest(request_id=request_id))).decisions)


def first_token(number: int, seconds: float) -> conductor_pb2.FirstTokenMeasurement:
    return conductor_pb2.FirstTokenMeasurement(
        placement_number=number, ttft_us=round(seconds * 1e6), prefill_instance_id="p1", compute_us=7, local_tokens=48
    )


async def test_an_explanation_shows_a_placement_and_its_outcome(world):
    members = await world.cluster()
    await members["p1"].report(stored=(0, 1, 2))
    load = conductor_pb2.InstanceLoad(pending_prefill_tokens=15_000)
    await members["p0"].report(load=load)
    lb = await world.balancer()
    placement = (await lb.place(ask(f"mine.{UNIQUE}", tbt_slo_ms=70)))[f"mine.{UNIQUE}"].placement
    assert placement.prefill_instance_id == "p1"
    world.now_s += 2
    await members["p0"].report(load=conductor_pb2.InstanceLoad())
    (decision,) = await explained(world, f"chatcmpl-{UNIQUE}")
    assert decision.placement == placement
    assert not decision.HasField("first_token")
    assert (decision.age_ms, decision.model, decision.prompt_tokens, decision.max_tokens) == (2000, "m", 65, 8)
    assert (decision.block_tokens, decision.candidates, decision.tbt_limit_ms) == (16, 2, 70)
    assert decision.ttft_limit_ms == 30_000
    assert decision.because.startswith(
        "went to p1 (decodes on d0) because it holds 3 of 4 blocks and nobody waits there"
    )
    (other,) = decision.others
    assert (other.instance_id, other.queue_ms, other.held_blocks) == ("p0", 1500, 0)
    assert (decision.chosen.held_blocks, decision.chosen.ttft_ms) == (3, placement.predicted_ttft_ms)
    told = first_token(placement.number, placement.predicted_ttft_ms / 1e3 + 0.2)
    await members["d0"].report(first_tokens=[told])
    (decision,) = await explained(world, "mine")
    assert decision.first_token == told
    assert world.metric("measured_ttft_seconds_count") == 1
    assert world.metric("ttft_error_seconds_bucket", le="0.1") == 0
    assert world.metric("ttft_error_seconds_bucket", le="0.3") == 1
    off = 0.2 / (placement.predicted_ttft_ms / 1e3 + 0.2)
    assert world.metric("ttft_error_ratio", model="m") == pytest.approx(off, rel=1e-3)


async def test_only_the_instance_that_decodes_can_tell_and_only_once(world):
    members = await world.cluster()
    lb = await world.balancer()
    number = (await lb.place(ask()))["r"].placement.number
    broken_clock = first_token(number, 1e6)
    strangers = [first_token(0, 1.0), first_token(number + 1, 1.0), first_token(2**64 - 1, 1.0)]
    await members["p0"].report(first_tokens=[first_token(number, 5.0)])
    await members["d0"].report(first_tokens=[broken_clock, *strangers])
    assert world.metric("measured_ttft_seconds_count") == 0
    await members["d0"].report(first_tokens=[first_token(number, 1.0), first_token(number, 2.0)])
    assert world.metric("measured_ttft_seconds_count") == 1
    (decision,) = await explained(world, "r")
    assert decision.first_token.ttft_us == 1_000_000


async def test_attempts_are_in_order_and_a_restart_mixes_nothing(world):
    members = await world.cluster()
    lb = await world.balancer()
    first = (await lb.place(ask(UNIQUE)))[UNIQUE].placement
    again = Reporter(world.stub, "d0", DECODE, boot="2")
    await again.connect()
    second = (await lb.place(ask(f"{UNIQUE}~1", exclude_instance_ids=["p0"])))[f"{UNIQUE}~1"].placement
    assert second.prefill_instance_id == "p1"
    # The new boot reports both, but the first request's prediction was for the old boot.
    await again.report(first_tokens=[first_token(first.number, 3.0), first_token(second.number, 1.0)])
    decisions = await explained(world, UNIQUE)
    assert [each.request_id for each in decisions] == [UNIQUE, f"{UNIQUE}~1"]
    assert [each.first_token.ttft_us for each in decisions] == [0, 1_000_000]
    assert list(decisions[1].exclude_instance_ids) == ["p0"]
    assert world.metric("measured_ttft_seconds_count") == 1
    # A decision can still be explained when its instance is gone.
    await members["p1"].call.write(conductor_pb2.ReportSessionRequest(leaving=True))
    await lb.list_where(lambda listed: "p1" not in listed)
    assert (await explained(world, f"{UNIQUE}~1"))[0].placement == second


async def test_refusals_say_why(world):
    await world.cluster()
    lb = await world.balancer()
    await lb.place(ask("late", ttft_slo_ms=1), ask("malformed", prompt_tokens=0), ask("x", model="none"))
    (late,), (malformed,), (unknown,) = [await explained(world, name) for name in ("late", "malformed", "x")]
    assert late.error.code == "RESOURCE_EXHAUSTED"
    assert late.because.startswith("refused: predicted time to first token")
    assert late.chosen.instance_id in ("p0", "p1")
    assert late.ttft_limit_ms == 1
    assert (malformed.error.code, malformed.HasField("placement")) == ("INVALID_ARGUMENT", False)
    assert unknown.error.code == "NOT_FOUND"


async def test_what_is_not_known_is_not_found():
    async with World(explain_max=3) as world:
        await world.cluster()
        lb = await world.balancer()
        for number in range(5):
            await lb.place(ask(f"r{number}"))
        assert [len(await explained(world, f"r{number}")) for number in (2, 3, 4)] == [1, 1, 1]
        error = await failure(world.stub.Explain(conductor_pb2.ExplainRequest(request_id="r1")))
        assert isinstance(error, NotFound)
        assert "'r1' among the last 3" in error.message
        for wrong in ("", "x" * 257):
            error = await failure(world.stub.Explain(conductor_pb2.ExplainRequest(request_id=wrong)))
            assert isinstance(error, InvalidArgument)


async def test_it_can_be_off():
    async with World(explain_max=0) as world:
        p0, d0 = Reporter(world.stub, "p0", PREFILL), Reporter(world.stub, "d0", DECODE)
        await p0.connect()
        await d0.connect()
        answer = await world.stub.Schedule(ask())
        assert answer.placement.number == 0
        await d0.report(first_tokens=[first_token(1, 1.0)])
        error = await failure(world.stub.Explain(conductor_pb2.ExplainRequest(request_id="r")))
        assert isinstance(error, FailedPrecondition)
        assert "--explain-max" in error.message
