"""The cost of a token for the load balancer, the conductor and a worker while many streams are served at once.

Each token comes by itself, as from a GPU's steps of 20 ms. The cost is the difference between long and short answers,
less what the idle processes use in as much time."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from bench.e2e_cluster import pids_of
from bench.load import HttpClient, cpu_seconds, http_request, run_closed_loop
from bench.report import summary
from bench.router_prompts import Prompts
from bench.router_stub import MODEL
from launch.cluster import LocalCluster

STREAMS = 64
TOKEN_GAP_S = 0.02
PROMPT_BYTES = 1024
SHORT_TOKENS = 16


async def token_price(cluster: LocalCluster, prompts: Prompts, more_tokens: int, repetitions: int) -> dict[str, Any]:
    """Returns the CPU µs per token by kind of process, from answers of ``SHORT_TOKENS`` and of ``more_tokens`` more by
    turns."""
    pids: dict[str, list[int]] = {name: [pid] for name, pid in pids_of(cluster).items()}
    pids["worker"] = [service.pid for service in cluster.of_kind("mixed")]
    host = cluster.services["lb-0"].endpoints["http"]
    clients = [HttpClient(host, cluster.access.ssl_context()) for _ in range(STREAMS)]

    async def used(tokens: int) -> tuple[float, dict[str, float]]:
        """Returns the seconds that answers of ``tokens`` tokens take, and their CPU seconds by process."""
        bodies = [
            http_request(host, "/v1/completions", {"model": MODEL, "prompt": prompts.text()[1], "max_tokens": tokens,
                                                   "stream": True})
            for _ in range(STREAMS)
        ]  # fmt: skip
        before, began_s = {name: cpu_seconds(each) for name, each in pids.items()}, time.monotonic()
        if tokens:
            await run_closed_loop(lambda number: clients[number].send(bodies[number]), STREAMS, STREAMS)
        else:
            await asyncio.sleep(1.0)
        return time.monotonic() - began_s, {name: cpu_seconds(each) - before[name] for name, each in pids.items()}

    figures: dict[str, list[float]] = {name: [] for name in pids}
    gaps: list[float] = []
    try:
        await used(SHORT_TOKENS)
        idle_s, idle = await used(0)
        for _ in range(repetitions):
            short_s, short = await used(SHORT_TOKENS)
            long_s, long = await used(SHORT_TOKENS + more_tokens)
            gaps.append((long_s - short_s) / more_tokens * 1e3)
            for name, each in figures.items():
                alone = idle[name] / idle_s * (long_s - short_s)
                each.append((long[name] - short[name] - alone) / (STREAMS * more_tokens) * 1e6)
    finally:
        for client in clients:
            client.close()
    return {
        **{f"{name}_us_per_token": summary(each) for name, each in figures.items()},
        "ms_between_tokens": summary(gaps),
        "idle_ms_per_s": {name: round(each / idle_s * 1e3, 1) for name, each in idle.items()},
    }
