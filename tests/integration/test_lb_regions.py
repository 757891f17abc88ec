"""Requests that go to another region: what the client sees, what is left behind, and what must never happen."""

from __future__ import annotations

import asyncio
import json
import time

import grpc
import pytest

from pinyon.api.common.v1 import common_pb2
from pinyon.api.lb.v1 import lb_pb2, lb_pb2_grpc, peer_pb2
from pinyon.api.worker.v1 import worker_pb2
from pinyon.core.block_keys import tokens_to_bytes
from pinyon.frontdoor.access_log import AccessLog
from pinyon.frontdoor.regions import inbound as inbound_module
from pinyon.frontdoor.regions import links as link_module
from pinyon.routing.geography import parse_geography
from pinyon.runtime.outgoing import Outgoing, Pace
from tests.integration.lb_harness import MODEL, expected_text, running_lb, spin
from tests.integration.regions_harness import FULL, ROOMY, PeerCaller, peer_of, running_regions

REPORT = {"x-pinyon-report": "1"}


async def test_what_the_region_has_no_room_for_goes_to_another_one():
    async with running_regions("us", "eu") as regions:
        us, eu = regions["us"], regions["eu"]
        assert (await us.complete(max_tokens=5)).json["choices"][0]["text"] == expected_text(5, 5)
        assert (len(us.workers[0].submissions), len(eu.workers[0].submissions)) == (1, 0)
        regions.say("us", FULL)
        reply = await us.complete(max_tokens=5, headers=REPORT)
        assert reply.status == 200
        assert reply.json["choices"][0]["text"] == expected_text(5, 5)
        assert reply.json["usage"]["completion_tokens"] == 5
        assert reply.json["pinyon"]["region"] == "eu"
        streamed = await us.complete(max_tokens=5, stream=True)
        text = "".join(json.loads(event)["choices"][0]["text"] for event in streamed.events[:-1])
        assert text == expected_text(5, 5)
        assert (len(us.workers[0].submissions), len(eu.workers[0].submissions)) == (1, 2)
        assert us.gauge("forwarded_total", region="eu") == 2
        assert eu.gauge("accepted_total", region="us") == 2
        await regions.idle()


async def test_a_client_that_leaves_is_gone_on_every_hop():
    async with running_regions("us", "eu") as regions:
        regions.say("us", FULL)
        worker = regions["eu"].workers[0].hold()
        async with regions["us"].asking() as connection:
            await worker.until(lambda: worker.open)
            connection.drop()
            await worker.until(lambda: worker.cancelled)
        await regions.idle()


async def test_a_deadline_crosses_regions():
    async with running_regions("us", "eu", request_timeout_s=3.0) as regions:
        regions.say("us", FULL)
        worker = regions["eu"].workers[0].hold()
        reply = await regions["us"].complete()
        assert reply.status == 504
        assert 0 < worker.submissions[0].timeout_ms <= 3000
        await worker.until(lambda: worker.cancelled)
        await regions.idle()


async def test_a_stream_whose_region_dies_goes_on_with_the_same_tokens():
    async with running_regions("us", "eu") as regions:
        regions.say("us", FULL)
        there, here = regions["eu"].workers[0], regions["us"].workers[0]
        there.hold(3)
        async with regions["us"].asking(max_tokens=8, stream=True) as connection:
            await connection.head()
            first = await connection.chunk()
            await there.until(lambda: there.open)
            await regions["eu"].lb.grpc.drain(0)
            rest = [first]
            while chunk := await connection.chunk():
                rest.append(chunk)
        events = [line[6:] for line in b"".join(rest).decode().split("\n\n") if line]
        text = "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])
        assert text == expected_text(5, 8)
        assert here.submissions[0].generated_tokens >= 1
        assert here.submissions[0].model_fingerprint == there.fingerprint
        await regions["us"].idle()


async def test_a_stream_goes_on_elsewhere_when_a_regions_instances_die():
    async with running_regions("us", "eu") as regions:
        here, there = regions["us"].workers[0], regions["eu"].workers[0]
        here.die_at = 3
        reply = await regions["us"].complete(max_tokens=8, stream=True)
        text = "".join(json.loads(event)["choices"][0]["text"] for event in reply.events[:-1])
        assert text == expected_text(5, 8)
        assert there.submissions[0].generated_tokens == 3
        await regions.idle()


async def test_a_region_that_would_be_late_is_not_the_last_word():
    async with running_regions("us", "eu", "ap") as regions:
        late = common_pb2.Error(code="RESOURCE_EXHAUSTED", message="no instance is in time", retry_after_ms=1000)
        for name in ("us", "eu"):
            regions[name].conductor.error = late
        reply = await regions["us"].complete(max_tokens=3)
        assert reply.json["choices"][0]["text"] == expected_text(5, 3)
        assert len(regions["ap"].workers[0].submissions) == 1
        regions["ap"].conductor.error = late
        assert (await regions["us"].complete(max_tokens=3)).status == 429
        await regions.idle()


async def test_requests_wait_at_the_load_balancer_until_there_is_room():
    async with running_regions("us") as regions:
        us = regions["us"]
        regions.say("us", FULL)
        waiting = [asyncio.create_task(us.complete(max_tokens=2)) for _ in range(3)]
        await spin(lambda: us.gauge("queue_requests") == 3)
        assert not us.workers[0].submissions
        regions.say("us", ROOMY)
        assert [(await each).status for each in waiting] == [200] * 3
        await regions.idle()


async def test_a_region_without_instances_is_ready_while_others_are():
    async with running_regions("us", "eu") as regions:
        us, eu = regions["us"], regions["eu"]
        us.conductor.push([])
        await spin(lambda: not us.lb.view.servable(MODEL, us.clock()))
        assert (await us.complete(max_tokens=3)).json["choices"][0]["text"] == expected_text(5, 3)
        assert len(eu.workers[0].submissions) == 1
        assert (await us.get("/health/ready")).status == 200
        await eu.lb.grpc.drain(0)
        two = us.lb.models.of(MODEL).layers
        await spin(lambda: not any(target.live for target in two.remote))
        reply = await us.get("/health/ready")
        assert reply.status == 503
        assert "No instance" in reply.body.decode()


async def test_clocks_that_differ_do_not_matter():
    """One region's clock is eleven days ahead, the other's runs slower by a thousandth."""
    clocks = {"us": lambda: time.monotonic() + 1e6, "eu": lambda: 0.999 * time.monotonic() - 1e6}
    async with running_regions("us", "eu", clocks=clocks, request_timeout_s=600.0) as regions:
        for here, there in (("us", "eu"), ("eu", "us")):
            regions.say(here, FULL)
            assert (await regions[here].complete(max_tokens=5)).json["choices"][0]["text"] == expected_text(5, 5)
            submission = regions[there].workers[0].submissions[-1]
            assert 300_000 < submission.timeout_ms <= 600_000
            regions.say(here, ROOMY)
            await regions.knows(there, here, room=True)
        await regions.idle()


# -- law

GDPR = {"regions": {"us": [], "eu": ["gdpr"], "uk": ["gdpr"]}, "rules": [{"from": ["gdpr"], "to": ["gdpr"]}]}


async def test_what_a_region_must_not_send_is_refused_where_it_comes(tmp_path):
    """The sender has another policy by mistake."""
    policy = tmp_path / "geography.json"
    policy.write_text(json.dumps({"regions": {"us": [], "eu": []}, "rules": [{"from": ["eu"], "to": ["eu"]}]}))
    async with running_regions("us", "eu", geography_file=str(policy), linked=False) as regions:
        eu, us = regions["eu"], regions["us"]
        eu.lb.models.use(geography=parse_geography({}))
        eu.lb.regions.know([peer_of("us", us)])
        (link,) = eu.lb.regions.links
        await spin(lambda: link.talk is not None)
        await spin(lambda: link.talk is None)
        assert not link.sessions
        regions.say("eu", FULL)


async def test_a_dry_run_says_where_a_request_could_go(tmp_path):
    policy = tmp_path / "geography.json"
    policy.write_text(json.dumps(GDPR))
    async with running_regions("eu", "us", "uk", geography_file=str(policy), linked=False) as regions:
        eu = regions["eu"]
        eu.lb.regions.know([peer_of(name, regions[name]) for name in ("us", "uk")])
        await regions.knows("eu", "uk", room=True)
        async with grpc.aio.insecure_channel(eu.endpoints["grpc"]) as channel:
            stub = lb_pb2_grpc.LbServiceStub(channel)
            ways = (await stub.WhereTo(lb_pb2.WhereToRequest())).ways
            said = {each.region: (each.allowed, each.available) for each in ways}
            assert said["eu"] == said["uk"] == (True, True)
            assert "us" not in said or not said["us"][0]
            ways = (await stub.WhereTo(lb_pb2.WhereToRequest(geographies=["uk"]))).ways
            assert [each.region for each in ways if each.allowed] == ["uk"]
            assert "may be served in uk only" in ways[0].reason
            with pytest.raises(grpc.aio.AioRpcError) as unknown:
                await stub.WhereTo(lb_pb2.WhereToRequest(model="nonsense"))
            assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
        assert not any(bench.workers[0].submissions for bench in regions.values())


# -- strangers


class Caller(PeerCaller):
    async def meet(self) -> peer_pb2.SessionResponse:
        """Waits until it is welcome; returns the answer."""
        await self.hello()
        answer = await self.call.read()
        assert answer is not grpc.aio.EOF
        assert (answer.welcome.region, answer.welcome.lb_id) == ("us", "lb-us")
        return answer

    def request(self, *, hops: int = 1, stream_id: int = 1, tokens: int = 3) -> peer_pb2.ForwardedRequest:
        prompt = tokens_to_bytes([1 + number % 200 for number in range(tokens)])
        submission = worker_pb2.Submission(
            stream_id=stream_id, request_id=f"r{stream_id}", model=MODEL, prompt_tokens_le32=prompt
        )
        submission.sampling.max_tokens = 2
        return peer_pb2.ForwardedRequest(submission=submission.SerializeToString(), hops=hops)

    async def ask(self, **fields) -> None:
        await self.call.write(peer_pb2.SessionRequest(requests=[self.request(**fields)]))

    async def update(self) -> worker_pb2.StreamUpdate:
        while not (message := await self.call.read()).updates:
            pass
        return message.updates[0]


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"version": 1}, grpc.StatusCode.FAILED_PRECONDITION),
        ({"region": "a b"}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"lb_id": ""}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"kind": peer_pb2.PEER_KIND_UPSTREAM}, grpc.StatusCode.FAILED_PRECONDITION),
    ],
)
async def test_a_bad_hello_is_refused(fields, code):
    async with running_regions("us", linked=False) as regions, Caller(regions["us"]) as caller:
        await caller.hello(**fields)
        assert await caller.status() is code


async def test_http_requests_are_not_taken_for_tokens():
    async with running_regions("us", linked=False) as regions, Caller(regions["us"]) as caller:
        await caller.meet()
        await caller.call.write(peer_pb2.SessionRequest(raw_requests=[peer_pb2.RawRequest(hops=1)]))
        assert await caller.status() is grpc.StatusCode.FAILED_PRECONDITION


async def test_a_request_is_good_once_and_for_one_hop():
    async with running_regions("us", linked=False) as regions:
        async with Caller(regions["us"]) as caller:
            await caller.meet()
            await caller.ask(hops=2)
            error = (await caller.update()).error
            assert error.code == "FAILED_PRECONDITION"
            assert "2 regions" in error.message
            await caller.ask()
            assert await caller.status() is grpc.StatusCode.INVALID_ARGUMENT
        assert not regions["us"].workers[0].submissions
        await regions.idle()


async def test_the_log_names_a_refused_request_and_its_tenant(monkeypatch):
    logged = []
    monkeypatch.setattr(
        AccessLog, "answered", lambda _, method, route, *seen, quiet=False: logged.append((method, *seen))
    )
    async with running_regions("us", linked=False) as regions, Caller(regions["us"]) as caller:
        await caller.meet()
        submission = worker_pb2.Submission.FromString(caller.request().submission)
        submission.model, submission.request_class.tenant = "not here", "acme"
        refused = peer_pb2.ForwardedRequest(submission=submission.SerializeToString(), hops=1)
        await caller.call.write(peer_pb2.SessionRequest(requests=[refused]))
        await spin(lambda: logged)
    ((status, seen),) = [told for method, *told in logged if method == "FORWARDED"]
    assert (status, seen.request_id, seen.holder) == (429, "r1", "acme")


async def test_sessions_are_bounded(monkeypatch):
    monkeypatch.setattr(inbound_module, "SESSIONS_MAX", 1)
    async with running_regions("us", linked=False) as regions, Caller(regions["us"]) as caller:
        await caller.meet()
        async with Caller(regions["us"]) as other:
            assert await other.status() is grpc.StatusCode.RESOURCE_EXHAUSTED
        caller.call.cancel()
        async with running_lb(1, name="lb-eu", region="eu") as eu:  # it dials until it is welcome
            eu.lb.regions.know([peer_of("us", regions["us"])])
            (link,) = eu.lb.regions.links
            await spin(lambda: link.connected)


async def test_who_says_nothing_is_ended(monkeypatch):
    monkeypatch.setattr(inbound_module, "FIRST_S", 0.02)
    async with running_regions("us", linked=False) as regions, Caller(regions["us"]) as caller:
        assert await caller.status() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_load_balancer_of_no_region_forwards_nothing():
    async with running_lb(1) as bench, Caller(bench) as caller:
        assert await caller.status() is grpc.StatusCode.FAILED_PRECONDITION


async def test_a_caller_of_another_region_is_served():
    async with running_regions("us", linked=False) as regions, Caller(regions["us"]) as caller:
        met = await caller.meet()
        await caller.call.write(peer_pb2.SessionRequest(probe=7, requests=[caller.request()]))
        tokens, probes, state = [], set(), met.state if met.HasField("state") else None
        while True:
            message = await caller.call.read()
            probes.add(message.probe)
            state = message.state if message.HasField("state") else state
            for update in message.updates:
                tokens += update.tokens
            if message.updates and message.updates[-1].finish_reason:
                break
        assert tokens == [ord(char) for char in expected_text(3, 2)]
        assert 7 in probes
        assert state is not None
        assert state.models[0].instances == 1
        assert state.models[0].credits >= 1


async def test_a_caller_that_falls_silent_is_left(monkeypatch):
    """A frozen caller keeps its connection, but its requests would be served in vain."""
    monkeypatch.setattr(inbound_module, "SILENT_TICKS", 5)
    async with running_regions("us", linked=False) as regions, Caller(regions["us"]) as caller:
        us = regions["us"]
        us.workers[0].hold()
        await caller.meet()
        await caller.ask(stream_id=1)
        await us.workers[0].until(lambda: us.workers[0].open)
        await spin(lambda: us.lb.serving.running == 0)  # although no answer is read, either
        assert await caller.status() is grpc.StatusCode.UNAVAILABLE
        us.workers[0].go.set()
        await regions.idle()


async def test_a_peer_holds_no_more_bytes_than_it_leaves_free():
    async with running_regions("us", linked=False, bodies_limit_mib=1) as regions, Caller(regions["us"]) as caller:
        us, worker = regions["us"], regions["us"].workers[0]
        worker.hold()
        await caller.meet()
        for number in range(1, 5):  # 160 KB each: three are the half that one caller may hold
            await caller.ask(stream_id=number, tokens=40_000)
        refused = await caller.update()
        assert refused.stream_id == 4
        assert (refused.error.code, refused.error.field) == ("RESOURCE_EXHAUSTED", "region")
        await spin(lambda: us.lb.serving.running == 3)
        assert 480_000 < us.lb.serving.budget.used <= 1 << 19
        worker.go.set()
        ended: set[int] = set()
        while len(ended) < 3:
            ended |= {each.stream_id for each in (await caller.call.read()).updates if each.finish_reason}
        await spin(lambda: us.lb.serving.running == 0)
        assert us.lb.serving.budget.used == 0
        await caller.ask(stream_id=5, tokens=40_000)
        update = await caller.update()
        assert (update.stream_id, update.error.code) == (5, "")
        await regions.idle()


async def test_a_silent_region_is_left(monkeypatch):
    """The region's load balancer is frozen, so its streams continue elsewhere."""
    monkeypatch.setattr(link_module, "TICK_S", 0.02)
    async with running_regions("us", "eu") as regions:
        regions.say("us", FULL)
        there = regions["eu"].workers[0]
        there.hold(3)
        running = asyncio.create_task(regions["us"].complete(max_tokens=8))
        await there.until(lambda: there.open)
        for inbound in [*regions["eu"].lb.serving.sessions]:
            pace = Pace(lambda: 0, time.monotonic)
            inbound._outgoing = Outgoing(peer_pb2.SessionResponse, pace, 9)  # nothing that goes into it is written
        assert (await running).json["choices"][0]["text"] == expected_text(5, 8)
        there.go.set()
        await regions.idle()
