"""The load balancer's session with a controller that the test plays."""

from __future__ import annotations

import asyncio

import grpc

from pinyon.api.controller.v1 import controller_pb2, controller_pb2_grpc
from pinyon.federation.view import Cluster, Federation, LbInfo, RegionView
from pinyon.messages.federation import federation_to_proto
from tests.stub_membership import StubMembership

WAIT_S = 60.0
INFO = LbInfo("b-0", "1", "b", "h:1")


def told(epoch: str, version: int) -> Federation:
    clusters = (Cluster("a", "a", "h:7", owners=("a-0",), adopter="b-0"), Cluster("b", "b", "h:8", owners=("b-0",)))
    return Federation(epoch, version, (RegionView("a"),), (), clusters)


class Played(controller_pb2_grpc.ControllerServiceServicer):
    def __init__(self) -> None:
        self.came: asyncio.Queue[controller_pb2.SessionRequest] = asyncio.Queue()
        self.says: asyncio.Queue[controller_pb2.SessionResponse | None] = asyncio.Queue()
        self.sessions = 0

    async def Session(self, requests, context):
        self.sessions += 1

        async def read() -> None:
            async for message in requests:
                self.came.put_nowait(message)

        reading = asyncio.ensure_future(read())
        while (message := await self.says.get()) is not None:
            yield message
        reading.cancel()

    def say(self, federation: Federation | None, epoch: str = "", version: int = 0, lease_ms: int = 5000) -> None:
        message = controller_pb2.SessionResponse(epoch=epoch, version=version, lease_ms=lease_ms)
        if federation is not None:
            message.epoch, message.version = federation.epoch, federation.version
            message.federation.CopyFrom(federation_to_proto(federation))
        self.says.put_nowait(message)

    async def hears(self) -> controller_pb2.SessionRequest:
        return await asyncio.wait_for(self.came.get(), WAIT_S)


class Bench:
    def __init__(self) -> None:
        self.played = Played()
        self.federations: asyncio.Queue[Federation] = asyncio.Queue()
        self.now_s = 100.0

    async def __aenter__(self) -> Bench:
        self.server = grpc.aio.server()
        controller_pb2_grpc.add_ControllerServiceServicer_to_server(self.played, self.server)
        address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        await self.server.start()
        self.session = StubMembership(address, "b-0", self.federations.put_nowait, lambda: self.now_s, period_s=3600)
        self.session.load_now.queue = 7
        self.session.latencies_now = {"a-0": 10.0}
        self.session.start(INFO)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()
        await self.server.stop(None)

    async def news(self) -> Federation:
        return await asyncio.wait_for(self.federations.get(), WAIT_S)


async def test_it_registers_reports_what_has_changed_and_says_farewell():
    async with Bench() as bench:
        first = await bench.played.hears()
        assert (first.registration.lb_id, first.load.queue, first.HasField("known")) == ("b-0", 7, False)
        assert first.latencies_ms == {"a-0": 10.0}
        assert not bench.session.connected, "nobody has answered"
        bench.played.say(told("e", 1))
        await bench.news()
        assert bench.session.connected
        bench.session.latencies_now = {"a-0": 10.5, "c-0": 3.0}
        bench.session.wake()
        second = await bench.played.hears()
        assert second.latencies_ms == {"c-0": 3.0}, "10.5 is no news"
        assert not second.HasField("registration")
        closing = asyncio.ensure_future(bench.session.close())
        assert (await bench.played.hears()).leaving
        bench.played.says.put_nowait(None)
        await closing


async def test_only_news_counts_and_another_memory_is_news():
    async with Bench() as bench:
        await bench.played.hears()
        for federation in (told("e", 5), told("e", 4), told("e", 5), told("f", 1), told("f", 2)):
            bench.played.say(federation)
        bench.played.says.put_nowait(
            controller_pb2.SessionResponse(
                federation=controller_pb2.Federation(clusters=[controller_pb2.Cluster(region="no region")])
            )
        )
        bench.played.say(told("f", 3))
        seen = [await bench.news() for _ in range(4)]
        assert [(each.epoch, each.version) for each in seen] == [("e", 5), ("f", 1), ("f", 2), ("f", 3)]
        assert bench.session.federation == told("f", 3)
        assert bench.played.sessions == 1


async def test_a_controller_that_comes_back_is_told_what_was_known():
    async with Bench() as bench:
        await bench.played.hears()
        bench.played.say(told("e", 5))
        await bench.news()
        bench.played.says.put_nowait(None)
        again = await bench.played.hears()
        assert again.registration.lb_id == "b-0"
        assert again.known == federation_to_proto(told("e", 5))
        assert again.latencies_ms == {"a-0": 10.0}, "a new session is told all"


async def test_adoptions_while_nobody_says_anything():
    async with Bench() as bench:
        assert bench.session.adopted() == ()
        await bench.played.hears()
        bench.played.say(told("e", 5), lease_ms=4000)
        adopted = (await bench.news()).adopted_by("b-0")
        assert len(adopted) == 1
        assert bench.session.adopted(("a-0",)) == adopted
        bench.now_s += 4.0
        assert bench.session.adopted(("a-0",)) == ()
        assert bench.session.adopted(("c-0",)) == adopted
        bench.played.say(None, "e", 5)
        bench.session.wake()
        async with asyncio.timeout(WAIT_S):
            while not bench.session.adopted(("a-0",)):  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_one_that_cannot_take_it_goes_on():
    async with Bench() as bench:

        def broken(_: Federation) -> None:
            raise RuntimeError("a defect")

        bench.session.told = broken
        await bench.played.hears()
        bench.played.say(told("e", 5))
        async with asyncio.timeout(WAIT_S):
            while bench.session.federation is None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert bench.session.connected


async def test_without_a_controller_there_is_nothing():
    session = StubMembership("", "b-0", lambda _: None)
    session.start(INFO)
    assert not session.connected
    assert session.adopted() == ()
    await session.close()
