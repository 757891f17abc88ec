"""Clients that disconnect in every phase: afterwards no slot, lease, buffer or queue entry is left on any service."""

from __future__ import annotations

import asyncio
import json
import random

import grpc
import pytest

from launch.cluster import LocalCluster
from launch.scrape import Scrape
from pinyon.api.common.v1 import common_pb2
from pinyon.api.lb.v1 import lb_pb2, lb_pb2_grpc
from tests.cluster.asking import completion
from tests.cluster.observe import wait_idle
from tests.cluster.specs import cluster_spec
from tests.forks import forked
from tests.http_client import Connection
from tests.waiting import WAIT_S

SEED = 77


class Stream(Connection):
    """A streaming completion on its own connection, read event by event and dropped at will."""

    def __init__(self, cluster: LocalCluster, prompt: str, max_tokens: int) -> None:
        super().__init__(cluster.services["lb-0"].endpoints["http"], cluster.access.ssl_context())
        self._body = json.dumps(completion(prompt=prompt, max_tokens=max_tokens, stream=True, ignore_eos=True))

    async def begin(self) -> None:
        await self.__aenter__()
        self.send("POST", "/v1/completions", self._body.encode(), {"content-type": "application/json"})
        await self.writer.drain()

    async def events(self, count: int) -> int:
        """Waits for up to ``count`` events; returns how many arrived before the end."""
        seen = 0
        while seen < count:
            line = await asyncio.wait_for(self.reader.readline(), WAIT_S)
            if not line or line.startswith(b"data: [DONE]"):
                break
            seen += line.startswith(b"data: ")
        return seen


LONG = "A prompt that takes a while to compute, because it is long. " * 40


async def test_deadlines_release_everything(cluster):
    async with cluster.access.channel(cluster.services["lb-0"], kind=grpc.aio) as channel:
        stub = lb_pb2_grpc.LbServiceStub(channel)
        request = lb_pb2.GenerateRequest(
            prompt=f"deadline {LONG}", sampling=common_pb2.SamplingParams(max_tokens=2000, ignore_eos=True)
        )

        async def read_all() -> None:
            async for _ in stub.Generate(request, timeout=0.7):
                pass

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_all()
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await wait_idle(cluster)


async def test_hanging_up_at_random_while_everything_is_full(tmp_path):
    """Requests exceed the room for them, so that some wait in queues when their client disconnects."""
    random_ = random.Random(SEED)
    print(f"seed {SEED}")
    spec = cluster_spec(prefill=1, decode=1, pool_blocks=64, store_mib=4)
    with LocalCluster(spec, tmp_path, forked.with_small_model) as small:
        streams = [Stream(small, f"{number} {LONG[: random_.randrange(100, 750)]}", 60) for number in range(24)]
        for stream in streams:
            await stream.begin()
        leaving = streams[::2]
        random_.shuffle(leaving)
        # From the first event of any stream on, some requests run and others wait.
        assert await streams[1].events(1) == 1
        for stream in leaving:
            stream.drop()
            await asyncio.sleep(random_.random() * 0.05)  # spreads the disconnects over phases; nothing relies on it
        counts = await asyncio.gather(*(stream.events(10_000) for stream in streams[1::2]))
        counts[0] += 1  # the event read above: a whole answer may be one event
        assert all(counts), "somebody who stayed got nothing"
        for stream in streams[1::2]:
            stream.drop()
        await wait_idle(small)
        assert Scrape(small).total("pinyon_worker_used_blocks") == 0
