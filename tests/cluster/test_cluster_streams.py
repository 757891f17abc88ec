"""Thousands of clients on one load balancer, and an engine that costs nothing."""

from __future__ import annotations

import asyncio
import json
import random

import pytest

from launch.cluster import ClusterSpec, LocalCluster
from tests.cluster.observe import wait_idle
from tests.forks import forked
from tests.http_client import Connection

STREAMS = 2000
SEED = 8021
WAIT_S = 300.0


@pytest.mark.slow
async def test_two_thousand_streams_are_all_served(tmp_path):
    random_ = random.Random(SEED)
    print(f"seed {SEED}")
    prompts = [f"{number:05} {'x' * random_.randrange(200)}" for number in range(STREAMS)]
    # A thousand wait for 32 places: a slow machine needs longer than the time after which a worker refuses them.
    patient = {"worker": ["--room-timeout-s", str(WAIT_S)]}
    spec = ClusterSpec(prefill=0, decode=0, mixed=2, engine="instant", pool_blocks=4096, extra=patient)
    with LocalCluster(spec, tmp_path, forked) as cluster:
        address = cluster.http.removeprefix("http://")
        connected = asyncio.Barrier(STREAMS)

        async def client(prompt: str) -> tuple[int, str]:
            body = json.dumps({"model": "pinyon-tiny", "prompt": prompt, "max_tokens": 8, "stream": True}).encode()
            async with Connection(address) as connection:
                await connected.wait()
                connection.send("POST", "/v1/completions", body)
                status, headers = await connection.head()
                if status != 200:
                    return status, (await connection.reader.readexactly(int(headers["content-length"]))).decode()
                events = b""
                while chunk := await connection.chunk():
                    events += chunk
            texts = [json.loads(event[6:]) for event in events.decode().split("\n\n")[:-2]]
            return status, "".join(each["choices"][0]["text"] for each in texts)

        async with asyncio.timeout(WAIT_S):
            answers = await asyncio.gather(*map(client, prompts))
        assert set(answers) == {(200, "abcdefgh")}
        await wait_idle(cluster)
