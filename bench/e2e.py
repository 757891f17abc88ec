"""What the load balancer and the conductor add to a request, against an engine that computes nothing.

A: a client speaks to a worker directly, over one long-lived stream. B: an HTTP client speaks to the load balancer,
which asks the conductor and streams from the same worker. Added latency is B - A; CPU is what load balancer and
conductor used, per request, by the scheduler's accounting. Both alternate within one run.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import statistics
import string
import tempfile
import time
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from bench.load import HttpClient, Sample, cpu_seconds, http_request, run_closed_loop
from bench.report import Aim, Report, parser, percentile, progress, summary
from pinyon.api.common.v1 import common_pb2
from pinyon.api.worker.v1 import worker_pb2, worker_pb2_grpc
from pinyon.runtime.channel import CHANNEL_OPTIONS
from pinyon.runtime.outbox import Outbox
from services.cluster import ClusterSpec, LocalCluster

# production-stack (vLLM project), round robin, CPU microseconds per request with two instant backends on a machine with
# two cores; 8 KB and 32 KB prompts, not streaming and streaming. Published figures, not measured in this run.
PRODUCTION_STACK_CPU_US = {(8, False): 732, (32, False): 1222, (8, True): 757, (32, True): 1205}
SIZES_KB = (8, 32)
PROMPT_KB = 512
"""Text of all prompts together: as many tokens as half of one instance's KV blocks, so that nothing is evicted."""
MAX_TOKENS = {False: 1, True: 16}


class DirectClient:
    """One Session stream to a worker, as a load balancer holds it."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._call: Any = worker_pb2_grpc.WorkerServiceStub(self._channel).Session()
        self._waiting: dict[int, tuple[asyncio.Future[None], list[float]]] = {}
        self._ids = itertools.count(1)
        self._outbox: Outbox[worker_pb2.Submission] = Outbox(4096)
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._write())]

    async def _write(self) -> None:
        while True:  # a gRPC call takes one write at a time
            await self._call.write(worker_pb2.SessionRequest(submissions=await self._outbox.take_all()))

    async def _read(self) -> None:
        async for message in self._call:
            now = time.perf_counter()
            for update in message.updates:
                future, times = self._waiting[update.stream_id]
                times.append(now)
                if update.finish_reason:
                    del self._waiting[update.stream_id]
                    if update.HasField("error"):
                        future.set_exception(RuntimeError(update.error.message))
                    else:
                        future.set_result(None)

    async def send(self, tokens: bytes, max_tokens: int) -> Sample:
        number = next(self._ids)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        times: list[float] = []
        self._waiting[number] = (future, times)
        submission = worker_pb2.Submission(
            stream_id=number,
            request_id=f"direct-{number}",
            prompt_tokens_le32=tokens,
            sampling=common_pb2.SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        )
        started = time.perf_counter()
        self._outbox.put(submission)
        await asyncio.wait_for(future, 30)
        return Sample(times[0] - started, times[-1] - started)

    async def close(self) -> None:
        self._call.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close(None)


def prompts(random_: random.Random, size_kb: int, count: int) -> list[str]:
    """Half of each prompt is one of four shared beginnings, the rest is its own."""
    letters = string.ascii_letters + " "
    half = size_kb * 512
    shared = ["".join(random_.choices(letters, k=half)) for _ in range(4)]
    return [shared[index % 4] + "".join(random_.choices(letters, k=half)) for index in range(count)]


async def measure(cluster: LocalCluster, size_kb: int, stream: bool, quick: bool, seed: int) -> dict[str, Any]:
    """Alternating repetitions of direct and through, at concurrency 1 and 16."""
    repetitions = 3 if quick else 7
    count = 60 if quick else 300
    random_ = random.Random(seed)
    texts = prompts(random_, size_kb, PROMPT_KB // size_kb)
    lb = cluster.services["lb-0"]
    host = lb.endpoints["http"]
    max_tokens = MAX_TOKENS[stream]
    model = cluster.spec.served_model_name or "pinyon-tiny"
    bodies = [
        http_request(
            host,
            "/v1/completions",
            {"model": model, "prompt": text, "max_tokens": max_tokens, "stream": stream, "temperature": 0,
             "ignore_eos": True},
        )
        for text in texts
    ]  # fmt: skip
    tokens = [np.frombuffer(text.encode(), dtype=np.uint8).astype("<u4").tobytes() for text in texts]
    pids = [lb.pid, cluster.services["conductor"].pid]
    direct = DirectClient(cluster.services["mixed-0"].endpoints["grpc"])
    clients = [HttpClient(host) for _ in range(16)]
    turn = itertools.count()

    async def through(number: int) -> Sample:
        return await clients[number].send(bodies[next(turn) % len(bodies)])

    async def straight(_: int) -> Sample:
        return await direct.send(tokens[next(turn) % len(tokens)], max_tokens)

    figures: dict[str, list[float]] = {}

    def note(key: str, value: float) -> None:
        figures.setdefault(key, []).append(value)

    try:
        await run_closed_loop(through, 100, 4)
        await run_closed_loop(straight, 100, 4)
        for _ in range(repetitions):
            gc.collect()
            for concurrency in (1, 16):
                one = await run_closed_loop(straight, count // (4 if concurrency == 1 else 1), concurrency)
                before = cpu_seconds(pids)
                split = [cpu_seconds([pid]) for pid in pids]
                other = await run_closed_loop(through, count // (4 if concurrency == 1 else 1), concurrency)
                cpu = (cpu_seconds(pids) - before) / len(other) * 1e6
                parts = [
                    (cpu_seconds([pid]) - start) / len(other) * 1e6 for pid, start in zip(pids, split, strict=True)
                ]
                for percent in (50, 99):
                    low = percentile([sample.total_s for sample in one], percent) * 1e6
                    high = percentile([sample.total_s for sample in other], percent) * 1e6
                    note(f"c{concurrency}_direct_p{percent}_us", low)
                    note(f"c{concurrency}_through_p{percent}_us", high)
                    note(f"c{concurrency}_added_p{percent}_us", high - low)
                note(f"c{concurrency}_cpu_us_per_request", cpu)
                note(f"c{concurrency}_cpu_lb_us_per_request", parts[0])
                note(f"c{concurrency}_cpu_conductor_us_per_request", parts[1])
    finally:
        await direct.close()
        for client in clients:
            client.close()
    return {key: summary(values) for key, values in figures.items()}


async def run(quick: bool, seed: int) -> Report:
    config = {
        "engine": "instant", "backends": 2, "max_tokens": {"not_streaming": 1, "streaming": 16},
        "concurrency": [1, 16], "seed": seed, "quick": quick,
    }  # fmt: skip
    report = Report("e2e", config)
    with tempfile.TemporaryDirectory() as logs:
        spec = ClusterSpec(
            prefill=0,
            decode=0,
            mixed=2,
            stores=0,
            engine="instant",
            pool_blocks=32768,
            log_level="warning",
            extra={"conductor": ("--ttft-slo-ms", "0")},  # before the first report, an instant engine is thought slow
        )
        with LocalCluster(spec, Path(logs)) as cluster:
            for size_kb in SIZES_KB:
                for stream in (False, True):
                    name = f"{size_kb}kb_{'stream' if stream else 'whole'}"
                    result = await measure(cluster, size_kb, stream, quick, seed)
                    report.results[name] = result
                    published = PRODUCTION_STACK_CPU_US[size_kb, stream]
                    report.baseline[name] = {"production_stack_published_cpu_us_per_request": published}
                    measured = result["c16_cpu_us_per_request"]["median"]
                    report.aims.append(Aim(f"{name}: CPU of lb + conductor, us per request", published / 2, measured))
                    progress(
                        f"{name}: CPU {measured:.0f} us per request (aim < {published / 2:.0f}), "
                        f"added p50 {result['c1_added_p50_us']['median']:.0f} us, "
                        f"p99 {result['c1_added_p99_us']['median']:.0f} us"
                    )
    return report


def main() -> None:
    arguments = parser(__doc__).parse_args()
    report = asyncio.run(run(arguments.quick, arguments.seed))
    medians = [values["c16_cpu_us_per_request"]["median"] for values in report.results.values()]
    report.results["mean_cpu_us_per_request"] = round(statistics.fmean(medians), 1)
    report.emit()


if __name__ == "__main__":
    main()
