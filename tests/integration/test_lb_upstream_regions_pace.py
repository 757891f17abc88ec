"""Answers of other makers' servers in another region are read no faster than the client takes them."""

from __future__ import annotations

import asyncio

from pinyon.api.lb.v1 import peer_pb2
from pinyon.frontdoor.answer import HIGH_BYTES
from tests.integration.lb_harness import WAIT_S, spin
from tests.integration.upstream_caller import Caller
from tests.integration.upstream_parts import DONE, Asked, Wire
from tests.integration.upstream_regions_parts import STREAM, running_upstream_regions


async def much(asked: Asked, wire: Wire) -> None:
    await wire.begin()
    event = b"data: " + b"x" * 8192 + b"\n\n"
    for _ in range(4500):
        await wire.chunk(event)
    await wire.chunk(DONE)
    await wire.end()


async def test_who_takes_nothing_makes_the_server_wait():
    async with running_upstream_regions("us") as regions, Caller(regions["us"]) as caller:
        server = regions["us"].servers[0]
        server.answer = much
        await caller.ask(caller.request())
        pool = regions["us"].lb.fleet.servers[server.url].pool
        await spin(lambda: any(each._answer is not None and each._answer._paused for each in pool._open))
        size = 0
        async with asyncio.timeout(WAIT_S):
            while size < HIGH_BYTES:
                size += sum(len(piece.data) for piece in (await caller.call.read()).raw_pieces)
        assert size < 3 * HIGH_BYTES
        (session,) = regions["us"].lb.serving.sessions
        assert not session._outgoing.messages
        news, taken = size, 0
        while size < 4500 * 8200 + len(DONE):
            if news:
                await caller.call.write(peer_pb2.SessionRequest(raw_taken=[peer_pb2.RawTaken(stream_id=1, bytes=news)]))
                taken += news
            async with asyncio.timeout(WAIT_S):
                news = sum(len(piece.data) for piece in (await caller.call.read()).raw_pieces)
            size += news
            assert size - taken < 3 * HIGH_BYTES
        await regions.idle()


async def test_a_slow_client_is_waited_for_on_every_hop():
    async with running_upstream_regions("us", "eu") as regions:
        us, eu = regions["us"], regions["eu"]
        await regions.full("us")
        eu.servers[0].answer = much
        reader, writer = await asyncio.open_connection(*us.http.rsplit(":", 1), limit=1 << 16)
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: lb\r\ncontent-length: %d\r\n\r\n%b"
        writer.write(head % (len(STREAM), STREAM))
        await reader.readuntil(b"\r\n\r\n")
        pool = eu.lb.fleet.servers[eu.servers[0].url].pool
        await spin(lambda: any(each._answer is not None and each._answer._paused for each in pool._open))
        (link,) = us.lb.regions.links
        (stream,) = link.talk.raw.streams.values()
        assert stream.answer._size < 3 * HIGH_BYTES
        received = 0
        async with asyncio.timeout(WAIT_S):
            while received < 4500 * 8200:
                data = await reader.read(1 << 20)
                assert data
                received += len(data)
                if data.endswith(b"0\r\n\r\n"):
                    break
        writer.close()
        await regions.idle()
