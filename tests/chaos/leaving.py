"""Clients that leave with their request under way, and how long each hop goes on working for them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc
import numpy as np

from launch.cluster import ClusterSpec, LocalCluster
from launch.scrape import Scrape
from pinyon.api.common.v1 import common_pb2
from pinyon.api.lb.v1 import lb_pb2, lb_pb2_grpc
from tests.chaos.clusters import HERE
from tests.chaos.contention import Contention
from tests.chaos.jobs import ID_BYTES, PacedJobs
from tests.cluster.observe import wait_idle
from tests.http_client import Connection

LEFT_S = 1.0
"""Time in which every hop must notice."""
GIVE_UP_S = 15.0
"""Time after which the measurement gives up; requests would run for much longer."""
SIZES_BYTES = (2_000, 20_000, 64_000, 90_000, 200_000)
ANSWER_TOKENS = 900
REQUEST_S = 60.0
"""The longest time that a client's request can take with all three clients: 900 steps of 50 ms, and the prompts."""
CLIENTS = 3
POLL_S = 0.02

HOPS = {
    "lb-0": ("pinyon_lb_in_flight_requests", "pinyon_lb_queue_requests", "pinyon_lb_worker_streams"),
    "decode-0": ("pinyon_worker_owned_requests", "pinyon_worker_running_requests", "pinyon_worker_remote_prefills"),
    "prefill-0": ("pinyon_worker_queued_prefills", "pinyon_worker_running_prefills", "pinyon_worker_pushes"),
}
"""Gauges that show whether a hop works on any request."""
MOMENTS = ("prompt", "whole", "stream", "grpc")
"""Moments at which the clients leave.

``prompt``: as soon as the load balancer has the request (at large sizes: during the prefill). ``whole``: while an
answer that is sent whole is generated. ``stream``: between two events of a stream. ``grpc``: between two messages of a
gRPC stream."""


@dataclass
class Leaving:
    """One size and moment. Seconds count from when all clients are gone; None: work went on for :data:`GIVE_UP_S`."""

    size_bytes: int
    moment: str
    noticed_s: dict[str, float | None]
    """The time until each hop noticed."""
    others: float = 0.0
    """Share of the processors' time that went to neither the suite nor its clients."""

    @property
    def worst_s(self) -> float | None:
        times = list(self.noticed_s.values())
        return None if None in times else max(time for time in times if time is not None)

    @property
    def good(self) -> bool:
        return self.worst_s is not None and self.worst_s <= LEFT_S

    def as_json(self) -> dict[str, object]:
        return {**asdict(self), "worst_s": self.worst_s, "good": self.good}


def leaving_spec() -> ClusterSpec:
    """Returns a cluster of one service per kind, so all hops are known, and so slow that no request ends by itself."""
    return ClusterSpec(
        prefill=1,
        decode=1,
        engine="paced",
        engine_profile=str(HERE / "profile-slow.json"),
        pool_blocks=16_384,
        # Steps are short compared with the second in which a hop must notice.
        extra={
            "worker": ("--prefill-chunk-tokens", "256", "--step-tokens", "288"),
            "conductor": ("--ttft-slo-ms", "0"),
        },
    )


async def leave_once(
    cluster: LocalCluster, jobs: PacedJobs, random_: random.Random, size_bytes: int, moment: str
) -> Leaving:
    """Lets three clients send, get as far as ``moment`` says, and leave at once."""
    async with contextlib.AsyncExitStack() as stack:
        clients: list[_Http] | list[_Grpc]
        if moment == "grpc":
            clients = [_Grpc(cluster, size_bytes, random_) for _ in range(CLIENTS)]
        else:
            stream = moment == "stream"
            bodies = [jobs.sized(random_, size_bytes, stream, ANSWER_TOKENS).body for _ in range(CLIENTS)]
            clients = [_Http(cluster, body) for body in bodies]
        for client in clients:
            stack.push_async_callback(client.close)
            await client.begin()
        if moment in ("stream", "grpc"):
            await asyncio.gather(*(client.pieces(3) for client in clients))
        elif moment == "whole":
            await _until(cluster, "decode-0", "pinyon_worker_running_requests", CLIENTS)
        else:
            await _until(cluster, "lb-0", "pinyon_lb_in_flight_requests", CLIENTS)
        for client in clients:
            client.leave()
        left_s = time.monotonic()
        contention = Contention(lambda: [service.pid for service in cluster.services.values()])
        times = await asyncio.gather(*(_idle(cluster, hop, left_s) for hop in HOPS))
        return Leaving(size_bytes, moment, dict(zip(HOPS, times, strict=True)), round(contention.share(), 2))


async def _until(cluster: LocalCluster, hop: str, gauge: str, count: int) -> None:
    async with asyncio.timeout(REQUEST_S):
        while True:  # gauges have no event to wait for
            if (await asyncio.to_thread(Scrape, cluster, (hop,), (gauge,))).total(gauge, hop) >= count:
                return
            await asyncio.sleep(POLL_S)


async def _idle(cluster: LocalCluster, hop: str, since_s: float) -> float | None:
    while True:
        scrape = await asyncio.to_thread(Scrape, cluster, (hop,), HOPS[hop])
        waited_s = time.monotonic() - since_s
        if not any(scrape.total(gauge, hop) for gauge in HOPS[hop]):
            return round(waited_s, 3)
        if waited_s > GIVE_UP_S:
            return None
        await asyncio.sleep(POLL_S)


class _Http(Connection):
    """A client on a socket of its own."""

    def __init__(self, cluster: LocalCluster, body: bytes) -> None:
        super().__init__(cluster.services["lb-0"].endpoints["http"])
        self._body = body

    async def begin(self) -> None:
        await self.__aenter__()
        self.send("POST", "/v1/completions", self._body, {"content-type": "application/json"})
        await self.writer.drain()

    async def pieces(self, count: int) -> None:
        async with asyncio.timeout(REQUEST_S):
            for _ in range(count):
                await self.reader.readuntil(b"data: ")

    def leave(self) -> None:
        self.writer.close()  # as when a program ends: the kernel tells the peer

    async def close(self) -> None:
        self.drop()


class _Grpc:
    """A client by gRPC, with the prompt as tokens."""

    def __init__(self, cluster: LocalCluster, size_bytes: int, random_: random.Random) -> None:
        self._channel = grpc.aio.insecure_channel(cluster.services["lb-0"].endpoints["grpc"])
        tokens = np.array(random_.choices(range(100, 123), k=size_bytes // ID_BYTES), dtype="<u4")
        self._message = lb_pb2.GenerateRequest(
            prompt_tokens_le32=tokens.tobytes(), sampling=common_pb2.SamplingParams(max_tokens=ANSWER_TOKENS)
        )

    async def begin(self) -> None:
        self._call = lb_pb2_grpc.LbServiceStub(self._channel).Generate(self._message, timeout=110)

    async def pieces(self, count: int) -> None:
        for _ in range(count):
            await self._call.read()

    def leave(self) -> None:
        self._call.cancel()

    async def close(self) -> None:
        await self._channel.close(None)


async def run_leaving(
    log_dir: Path, seed: str, say: Callable[[str], None], done: Callable[[Leaving, LocalCluster], None]
) -> None:
    """Measures all sizes and moments on one cluster."""
    random_ = random.Random(f"{seed} leaving")
    jobs = PacedJobs(random_)
    cluster = LocalCluster(leaving_spec(), log_dir)
    try:
        cluster.start(lambda line: say(f"starting: {line.partition(' ')[0]}"))
        for size_bytes, moment in itertools.product(SIZES_BYTES, MOMENTS):
            say(f"leaving: {size_bytes} bytes, {moment}")
            done(await leave_once(cluster, jobs, random_, size_bytes, moment), cluster)
            await wait_idle(cluster, 2 * REQUEST_S)  # if a hop did not notice, it works until then
    finally:
        cluster.stop()
