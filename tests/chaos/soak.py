"""A soak test: many requests, each with its own prompt, and how the memory of every process develops."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from pathlib import Path

from launch.cluster import ClusterSpec, LocalCluster
from tests.chaos.balancer import Balancer, NotServed, Trace
from tests.chaos.clusters import HERE
from tests.chaos.http_exchange import Exchange, HttpConnection, text_of
from tests.chaos.jobs import PacedJobs
from tests.chaos.memory import Samples
from tests.cluster.fault_tools import redis_process

CLIENTS = 12
SAMPLES = 80
ANSWER_TOKENS = 8
SIZES_BYTES = (500, 2_000, 4_000, 8_000)
"""Sizes of the prompts, large enough to fill every table bounded by blocks during the warm-up."""
LEAVE_SHARE = 0.03
"""The share of the clients that leave with their request under way."""
ANSWER_S = 60.0


class SoakResult:
    def __init__(self, samples: Samples) -> None:
        self.samples = samples
        self.served = 0
        self.left = 0
        self.failed: list[str] = []

    @property
    def done(self) -> int:
        return self.served + self.left + len(self.failed)

    def as_json(self) -> dict[str, object]:
        samples = self.samples
        return {
            "served": self.served,
            "left": self.left,
            "failed": self.failed[:20],
            "growth": [each.as_json() for each in samples.growths()],
            "requests": samples.requests,
            "resident_bytes": samples.resident,
        }


def soak_spec() -> ClusterSpec:
    """Returns a cluster whose pools and store fill within a few hundred requests, so later growth is not theirs."""
    return ClusterSpec(
        prefill=1,
        decode=1,
        engine="paced",
        engine_profile=str(HERE / "profile-instant.json"),
        pool_blocks=2_048,
        store_mib=2,
        log_level="warning",
        extra={"conductor": ("--ttft-slo-ms", "0")},
    )


async def run_soak(
    cluster: LocalCluster,
    count: int,
    seed: str,
    progress: Callable[[int], None],
    sizes_bytes: Sequence[int] = SIZES_BYTES,
) -> SoakResult:
    """Sends ``count`` requests of a few clients, streamed and whole; a few clients leave before the answer is whole."""
    pids = {name: service.pid for name, service in cluster.services.items()}
    pids["redis"] = redis_process(cluster).pid
    result = SoakResult(Samples(pids))
    random_ = random.Random(f"{seed} soak")
    jobs = PacedJobs(random_, ANSWER_TOKENS)
    address = cluster.services["lb-0"].endpoints["http"]
    numbers = iter(range(count))
    every = max(1, count // SAMPLES)
    result.samples.take(0)

    async def client(balancer: Balancer) -> None:
        for _ in numbers:
            job = jobs.sized(random_, random_.choice(sizes_bytes), random_.random() < 0.5)
            if random_.random() < LEAVE_SHARE:
                await _leave(address, job.body, random_.uniform(0.0, 0.02))
                result.left += 1
            else:
                try:
                    async with asyncio.timeout(ANSWER_S):
                        text = text_of(await balancer.send(job.body, Trace()))
                    if text != job.text:
                        result.failed.append(f"another text: {text!r} instead of {job.text!r}")
                    else:
                        result.served += 1
                except (NotServed, ValueError, TimeoutError) as error:
                    result.failed.append(f"{type(error).__name__}: {error}")
            if result.done % every == 0:
                result.samples.take(result.done)
            progress(result.done)

    async with Balancer([("lb-0", address)]) as balancer, asyncio.TaskGroup() as group:
        for _ in range(CLIENTS):
            group.create_task(client(balancer))
    return result


async def _leave(address: str, body: bytes, after_s: float) -> None:
    connection = await HttpConnection.open(address)
    try:
        async with asyncio.timeout(after_s):  # an arbitrary moment during the answer
            await connection.exchange(Exchange(), "/v1/completions", body)
    except TimeoutError:
        pass
    finally:
        connection.drop()


def start_soak(log_dir: Path, say: Callable[[str], None]) -> LocalCluster:
    cluster = LocalCluster(soak_spec(), log_dir)
    cluster.start(lambda line: say(f"starting: {line.partition(' ')[0]}"))
    return cluster
