"""Recovery: a failed instance is passed over, a returned one is used, and nothing that a fault taught lasts forever."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import pytest

from pinyon.api.common.v1 import common_pb2
from pinyon.api.conductor.v1 import conductor_pb2
from pinyon.frontdoor.instances.conductor_session import ConductorSession
from tests.integration.lb_harness import (
    MODEL,
    WAIT_S,
    Bench,
    FakeConductor,
    FakeWorker,
    expected_text,
    running_lb,
    spin,
)


async def restarted(bench: Bench, workers: list[FakeWorker], **switches) -> None:
    """Restarts the conductor on its port, with ``workers`` as all that have registered with it."""
    port = int(bench.conductor.address.rpartition(":")[2])
    sessions = bench.lb.conductor.sessions
    await bench.conductor.stop()
    bench.conductor.workers = workers
    for name, value in switches.items():
        setattr(bench.conductor, name, value)
    await bench.conductor.start(port)
    await spin(lambda: bench.lb.conductor.sessions > sessions)
    await spin(lambda: bench.lb.conductor.connected)


# ---------------------------------------------------------------- a conductor that has just started


@pytest.mark.parametrize("code", ["NOT_FOUND", "UNAVAILABLE"])
@pytest.mark.parametrize("known", [0, 1], ids=["empty", "shrunken"])
async def test_a_request_in_the_window_of_a_conductor_s_restart(code, known):
    """The conductor's list is empty, or has half a pair. By its older list the load balancer serves all at once."""
    async with running_lb(instances_grace_s=3600, placement_wait_s=WAIT_S) as bench:
        error = common_pb2.Error(code=code, message="no instance", retry_after_ms=1000)
        everyone = list(bench.conductor.workers)
        await restarted(bench, everyone[:known], error=error)
        assert bench.gauge("unconfirmed_instances") == 2 - known
        for number in range(4):
            reply = await bench.complete(f"ask {number}", {"x-pinyon-report": "1"}, max_tokens=2)
            assert reply.status == 200
            assert reply.json["pinyon"]["policy"] == "lb_skywalker"
        assert (await bench.get("/health/ready")).status == 200
        assert len(bench.conductor.requests) == 4, "the conductor was asked each time"
        bench.conductor.error = None
        bench.conductor.push(everyone)
        await spin(lambda: bench.gauge("unconfirmed_instances") == 0)
        reply = await bench.complete("later", {"x-pinyon-report": "1"}, max_tokens=2)
        assert reply.json["pinyon"]["policy"] == "fake"
        await bench.idle()


async def test_a_conductor_that_says_its_list_is_whole_is_believed():
    async with running_lb(instances_grace_s=3600, placement_wait_s=0.1) as bench:
        first, second = bench.workers
        await restarted(bench, [first], incomplete=True)
        assert bench.gauge("unconfirmed_instances") == 1
        bench.conductor.incomplete = False
        bench.conductor.push()
        await spin(lambda: bench.gauge("unconfirmed_instances") == 0)
        assert bench.lb.view.addresses == {first.address}
        assert second.address not in bench.lb.view.addresses


async def test_in_its_own_session_the_conductor_s_word_counts_at_once():
    async with running_lb(instances_grace_s=3600, placement_wait_s=0.05) as bench:
        for left in (bench.workers[1:], []):
            bench.conductor.push(left)
            await spin(lambda left=left: bench.lb.view.addresses == {each.address for each in left})
        assert (await bench.complete(max_tokens=2)).status == 503


async def test_instances_the_conductor_lost_are_tried_as_a_last_resort():
    """The conductor's network is at fault, or it was frozen: the load balancer still reaches the instances."""
    async with running_lb(placement_wait_s=WAIT_S) as bench:
        first, second = bench.workers
        for worker in bench.workers:
            worker.schedulable = False
        bench.conductor.error = common_pb2.Error(code="UNAVAILABLE", message="none")
        bench.conductor.push()
        await spin(lambda: not bench.lb.view.addresses)
        assert (await bench.complete(max_tokens=2)).status == 200
        second.schedulable = True
        bench.conductor.push()
        await spin(lambda: bench.lb.view.addresses)
        assert (await bench.complete(max_tokens=2)).status == 200
        assert [len(each.submissions) for each in (first, second)] == [1, 1]
        await bench.idle()


async def test_another_instance_at_a_kept_address_takes_its_place():
    async with running_lb(instances_grace_s=3600) as bench:
        old, other = bench.workers
        new = FakeWorker("w9")
        new.address = old.address
        await restarted(bench, [new])
        assert bench.gauge("unconfirmed_instances") == 1
        assert bench.lb.view.addresses == {new.address, other.address}


# ---------------------------------------------------------------- instances that are dead


@pytest.mark.parametrize("routing", ["least_loaded", "round_robin"])
async def test_three_dead_of_eight_are_never_503_while_others_idle(routing):
    """The dead ones have nothing in flight, so they are the least loaded; the first request tries them all."""
    async with running_lb(workers=8, routing=routing, attempts=2) as bench:
        await bench.lose_conductor()
        for worker in bench.workers[:3]:
            await worker.stop()
        replies = await asyncio.gather(*(bench.complete(f"ask {number}", max_tokens=2) for number in range(24)))
        assert {reply.status for reply in replies} == {200}
        assert bench.gauge("retries_total") >= 3
        await bench.idle()


async def test_instances_that_refuse_are_passed_over_however_many():
    """Five of eight instances drain, as in a rolling upgrade without a conductor."""
    async with running_lb(workers=8, attempts=2) as bench:
        await bench.lose_conductor()
        for worker in bench.workers[:5]:
            worker.error = common_pb2.Error(code="UNAVAILABLE", message="draining")
        assert (await bench.complete(max_tokens=2)).status == 200
        await bench.idle()


async def test_a_request_that_kills_instances_meets_few_of_them():
    async with running_lb(workers=8, attempts=3) as bench:
        for worker in bench.workers:
            worker.die_at = 0
        assert (await bench.complete(max_tokens=2)).status == 503
        assert sum(bool(worker.submissions) for worker in bench.workers) == 3
        await bench.idle()


async def test_an_instance_that_returns_on_its_address_is_used_again():
    async with running_lb(workers=1, placement_wait_s=WAIT_S) as bench:
        (worker,) = bench.workers
        assert (await bench.complete(max_tokens=2)).status == 200
        port = int(worker.address.rpartition(":")[2])
        for boot in ("2", "3"):
            await worker.stop()
            waiting = asyncio.ensure_future(bench.complete("while it is away", max_tokens=2))
            await bench.conductor.until(lambda: len(bench.conductor.requests) >= 2)
            await worker.start(port)
            worker.boot = boot
            bench.conductor.push()
            assert (await waiting).status == 200
        await bench.idle()


async def test_a_restarted_instance_gets_a_new_session_beside_the_old():
    """A session opened before may lead to the dead process at that address. If it lives, its requests are not cut."""
    async with running_lb(workers=1) as bench:
        (worker,) = bench.workers
        running = await bench.held(max_tokens=3)
        worker.boot = "2"
        bench.conductor.push()
        await spin(lambda: not bench.lb.clusters.workers._sessions)
        second = asyncio.ensure_future(bench.complete("new", max_tokens=3))
        await worker.until(lambda: len(worker.submissions) == 2)
        assert [each.stream_id for each in worker.submissions] == [1, 1], "each is the first one of its session"
        assert bench.gauge("worker_sessions") == 2
        worker.go.set()
        assert (await running).json["choices"][0]["text"] == expected_text(5, 3)
        assert (await second).status == 200
        await spin(lambda: bench.gauge("worker_sessions") == 1)
        await bench.idle()


async def test_a_session_to_a_gone_instance_ends_with_its_last_request():
    async with running_lb() as bench:
        first, second = bench.workers
        running = await bench.held(max_tokens=3)
        bench.conductor.push([second])
        await spin(lambda: bench.lb.view.addresses == {second.address})
        assert bench.gauge("worker_sessions") == 1
        first.go.set()
        assert (await running).status == 200
        await spin(lambda: bench.gauge("worker_sessions") == 0)
        await bench.idle()


# ---------------------------------------------------------------- other weights


@asynccontextmanager
async def upgrading(**settings):
    """Yields ``w0``, which generates two tokens and dies, and ``w1``, which has other weights already."""
    async with running_lb(placement_wait_s=0.1, **settings) as bench:
        old, new = bench.workers
        new.fingerprint = "new weights"
        bench.conductor.push()
        await spin(lambda: bench.lb.view.with_other_weights(MODEL, old.fingerprint))
        old.hold_after = old.die_at = 2
        yield bench, old, new


async def test_a_stream_never_goes_on_with_other_weights():
    async with upgrading() as (bench, _, new):
        reply = await bench.complete(max_tokens=6, stream=True)
        texts = [json.loads(event) for event in reply.events[:-1]]
        assert "".join(each["choices"][0]["text"] for each in texts if "choices" in each) == expected_text(5, 2)
        assert "no other one serves the weights it began with" in texts[-1]["error"]["message"]
        assert not new.submissions
        assert "w1" in bench.conductor.requests[1].exclude_instance_ids
        await bench.idle()


async def test_an_answer_that_nobody_has_seen_starts_over():
    async with upgrading() as (bench, old, new):
        reply = await bench.complete(max_tokens=6)
        assert reply.json["choices"][0]["text"] == expected_text(5, 6)
        assert reply.json["usage"]["completion_tokens"] == 6
        assert (new.submissions[0].generated_tokens, new.submissions[0].model_fingerprint) == (0, "new weights")
        assert old.submissions[0].model_fingerprint == old.fingerprint
        await bench.idle()


async def test_with_the_same_weights_elsewhere_it_goes_on_there():
    async with running_lb(workers=3) as bench:
        old, new, same = bench.workers
        new.fingerprint = "new weights"
        bench.conductor.push()
        await spin(lambda: bench.lb.view.with_other_weights(MODEL, old.fingerprint))
        old.die_at = 2
        for stream in (False, True):
            reply = await bench.complete(max_tokens=6, stream=stream)
            assert reply.status == 200
        assert not new.submissions
        assert [each.generated_tokens for each in same.submissions[:1]] == [2]
        await bench.idle()


async def test_another_instance_serves_where_an_upgraded_one_refuses():
    """The list still has its old weights, so the request carries the old keys and the old fingerprint."""
    async with running_lb() as bench:
        first, second = bench.workers
        first.fingerprint = "new weights"
        assert (await bench.complete(max_tokens=2)).status == 200
        assert len(second.submissions) == 1
        await bench.idle()


# ---------------------------------------------------------------- one bad message


async def test_a_list_that_cannot_be_taken_ends_nobody_s_request():
    conductor, lists = FakeConductor([]), []

    def on_instances(message: conductor_pb2.InstanceList, first: bool) -> None:
        lists.append(first)
        raise ValueError("unexpected")

    worker = FakeWorker("w0")
    conductor.workers = [worker]
    await conductor.start()
    session = ConductorSession(conductor.address, "lb", on_instances, 30.0, lambda: 0)
    session.start()
    try:
        await spin(lambda: session.connected)
        await conductor.until(lambda: conductor.messages)  # otherwise the hello's answer would be late, too
        conductor.late.clear()
        placing = asyncio.ensure_future(session.place(conductor_pb2.ScheduleRequest(request_id="r"), 8))
        await conductor.until(lambda: conductor.requests)
        conductor.push()
        await spin(lambda: len(lists) == 2)
        conductor.late.set()
        assert (await placing).decode_instance_id == "w0"
        assert session.sessions == 1
        assert lists == [True, False]
    finally:
        await session.close()
        await conductor.stop()


async def test_a_message_that_makes_no_sense_fails_its_request_only():
    async with running_lb(workers=1, attempts=1) as bench:
        (worker,) = bench.workers
        good = await bench.held("good", max_tokens=3)
        worker.error = common_pb2.Error(code="NO SUCH CODE", message="what")
        assert (await bench.complete("bad", max_tokens=3)).status == 500
        worker.error = None
        worker.go.set()
        assert (await good).status == 200
        await bench.idle()


# ---------------------------------------------------------------- metrics


async def test_requests_without_a_token_are_counted_apart():
    async with running_lb() as bench:
        assert (await bench.complete(max_tokens=2)).status == 200
        bench.workers[0].error = common_pb2.Error(code="INTERNAL", message="broken")
        assert (await bench.complete(max_tokens=2)).status == 500
        await bench.idle()
        assert bench.gauge("ttft_seconds_count", model=MODEL) == 1
        assert bench.gauge("no_token_total", finish="internal", model=MODEL) == 1


async def test_a_client_gone_before_its_first_token_is_counted_apart():
    async with running_lb() as bench:
        bench.workers[0].hold()
        async with bench.asking(max_tokens=2) as connection:
            await bench.workers[0].until(lambda: bench.workers[0].open)
            connection.drop()
            await bench.idle()
        assert bench.gauge("no_token_total", finish="cancelled", model=MODEL) == 1
        assert bench.gauge("ttft_seconds_count", model=MODEL) == 0
