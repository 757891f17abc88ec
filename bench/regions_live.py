"""Three regions of paced instances as processes, and closed-loop clients that send the simulator's programs to them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from bench.far_lb import launch_far
from bench.report import percentile
from launch.cluster import ClusterSpec, LocalCluster
from launch.regions import LocalRegions, RegionsSpec
from pinyon_lab.simulator.regions.programs import Program, ProgramStep, RegionProgramSource
from pinyon_lab.simulator.regions.settings import RoutingSystem

MODEL = "pinyon-tiny"
BLOCK_TOKENS = 16
VOCABULARY = 250
"""The number of tokens of which prompts are made: bytes, but for the last ones."""
REQUEST_S = 600.0
MAX_BATCH = 256
"""A bound that KV memory reaches first, as in the paper's servers."""

Delays = Mapping[tuple[str, str], float]
"""The seconds there and back, by regions in either order."""


@dataclass(frozen=True)
class Live:
    """The addresses for the clients of each region, and how far they are (seconds there and back)."""

    http: Mapping[str, str]
    away_s: Mapping[str, float]


@contextmanager
def live(
    system: RoutingSystem, regions: tuple[str, ...], instances: int, delays: Delays, pool_blocks: int, max_batch: int
) -> Iterator[Live]:
    """Runs ``instances`` in each region. A system that is ``alone`` in one region has its only load balancer there,
    which pushes to the instances of all."""

    def trip_s(one: str, other: str) -> float:
        return 0.0 if one == other else delays.get((one, other), delays.get((other, one), 0.0))

    routing = ("--place-by", "routing", "--routing", system.policy, "--pushing", system.pushing, "--lame-duck-s", "0")
    spec = ClusterSpec(
        prefill=0, decode=0, mixed=instances, stores=0, engine="paced", engine_profile="l4-llama-8b",
        pool_blocks=pool_blocks, block_tokens=BLOCK_TOKENS, log_level="warning",
        extra={"lb": routing, "mixed": ("--max-batch", str(max_batch))},
    )  # fmt: skip
    if system.alone:
        names = [(number, regions[number // instances]) for number in range(instances * len(regions))]
        far = ",".join(
            f"mixed-{number}={trip_s(system.alone, region) * 500:g}"
            for number, region in names
            if trip_s(system.alone, region)
        )
        options = ClusterSpec(**{**vars(spec), "mixed": len(names), "extra": {"lb": (*routing, "--far", far)}})
        with LocalCluster(options, launch=launch_far) as cluster:
            yield Live(dict.fromkeys(regions, cluster.http), {each: trip_s(system.alone, each) for each in regions})
        return
    delays_ms = {f"{one}:{other}": seconds * 1e3 for (one, other), seconds in delays.items()}
    with LocalRegions(RegionsSpec(regions, spec, delays_ms=delays_ms, static_peers=True)) as several:
        yield Live({name: each.http for name, each in several.clusters.items()}, dict.fromkeys(regions, 0.0))


@dataclass
class Run:
    """The figures of the requests that ended in the window."""

    seconds: float
    output_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    forwarded: int = 0
    failed: int = 0
    ttft_s: list[float] = field(default_factory=list)
    e2e_s: list[float] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        requests = max(1, len(self.e2e_s))
        return {
            "requests": len(self.e2e_s),
            "output_tokens_per_s": round(self.output_tokens / self.seconds, 2),
            "requests_per_s": round(len(self.e2e_s) / self.seconds, 3),
            "ttft_mean_s": round(sum(self.ttft_s) / requests, 3),
            "ttft_p50_s": round(percentile(self.ttft_s or [0.0], 50), 3),
            "ttft_p90_s": round(percentile(self.ttft_s or [0.0], 90), 3),
            "e2e_p50_s": round(percentile(self.e2e_s or [0.0], 50), 3),
            "hit_share": round(self.cached_tokens / max(1, self.prompt_tokens), 4),
            "forwarded_share": round(self.forwarded / requests, 4),
            "failed": self.failed,
        }


async def measure(
    where: Live,
    sources: Mapping[str, RegionProgramSource],
    clients: Mapping[str, int],
    warm_s: float,
    seconds: float,
    seed: int,
) -> Run:
    """Runs clients that each issue one program at a time (§5.1), for ``warm_s`` and then ``seconds`` that count."""
    run = Run(seconds)
    began_s = time.monotonic()
    window = began_s + warm_s, began_s + warm_s + seconds

    async def client(region: str, number: int) -> None:
        rng = Random(f"{seed} {region} {number}")
        async with _connections(where.http[region]) as connections:
            while time.monotonic() < window[1]:
                await _Played(run, window, where, region, connections).play(sources[region].program(rng))

    tasks = [
        asyncio.create_task(client(region, number)) for region, count in clients.items() for number in range(count)
    ]
    await asyncio.sleep(warm_s + seconds)
    for task in tasks:
        task.cancel()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    for each in ended:
        if isinstance(each, Exception):
            raise each
    return run


class _Connections:
    """Connections that are kept alive; as many as one client needs at once."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._all: list[asyncio.StreamWriter] = []

    async def post(self, body: bytes, session: str) -> tuple[int, dict[str, Any]]:
        reader, writer = self._free.pop() if self._free else await self._open()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: lb\r\ncontent-type: application/json\r\nx-pinyon-report: 1\r\n"
            b"x-pinyon-session: %s\r\ncontent-length: %d\r\n\r\n" % (session.encode(), len(body)) + body
        )
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        status = int(head.split()[1])
        length = next(int(line.split(":")[1]) for line in head.split("\r\n") if line.startswith("content-length:"))
        answer = json.loads(await reader.readexactly(length))
        self._free.append((reader, writer))
        return status, answer

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        opened = await asyncio.open_connection(self._host, self._port, limit=1 << 24)
        self._all.append(opened[1])
        return opened

    def close(self) -> None:
        for writer in self._all:
            writer.transport.abort()


@asynccontextmanager
async def _connections(url: str) -> AsyncIterator[_Connections]:
    connections = _Connections(url)
    try:
        yield connections
    finally:
        connections.close()


class _Played:
    """One program while it is played."""

    def __init__(
        self, run: Run, window: tuple[float, float], where: Live, region: str, connections: _Connections
    ) -> None:
        self._run, self._window = run, window
        self._away_s = where.away_s[region]
        self._connections = connections
        self._texts: list[list[int]] = []
        """The prompt and answer of each step that has ended."""

    async def play(self, program: Program) -> None:
        steps = program.steps
        self._texts = [[] for _ in steps]
        ended = [asyncio.Event() for _ in steps]

        async def step(number: int) -> None:
            if steps[number].after >= 0:
                await ended[steps[number].after].wait()
            await self._ask(program, steps, number)
            ended[number].set()

        async with asyncio.TaskGroup() as group:
            for number in range(len(steps)):
                group.create_task(step(number))

    def _prompt(self, steps: tuple[ProgramStep, ...], number: int) -> list[int]:
        """Returns the parent's prompt and real answer (not the one that was drawn), and then what is new."""
        step = steps[number]
        if step.after < 0:
            return _tokens(step, 0)
        begun = self._texts[step.after]
        rest = _tokens(step, len(begun) // BLOCK_TOKENS)
        return begun + rest[: max(1, step.tokens - len(begun))]

    async def _ask(self, program: Program, steps: tuple[ProgramStep, ...], number: int) -> None:
        step, run = steps[number], self._run
        prompt = self._prompt(steps, number)
        body = json.dumps(
            {
                "model": MODEL, "prompt": prompt, "max_tokens": max(1, step.output_tokens), "ignore_eos": True,
                "temperature": 0.8, "return_token_ids": True,
            }
        ).encode()  # fmt: skip
        sent_s = time.monotonic()
        await asyncio.sleep(self._away_s / 2)
        async with asyncio.timeout(REQUEST_S):
            status, answer = await self._connections.post(body, program.user.replace(" ", "-"))
        await asyncio.sleep(self._away_s / 2)
        now_s = time.monotonic()
        counts = self._window[0] <= now_s <= self._window[1]
        if status != 200:
            run.failed += counts
            self._texts[number] = prompt
            return
        choice = answer["choices"][0]
        self._texts[number] = prompt + choice["token_ids"]
        if counts:
            report, usage = answer["pinyon"], answer["usage"]
            run.output_tokens += usage["completion_tokens"]
            run.prompt_tokens += usage["prompt_tokens"]
            run.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
            run.forwarded += "region" in report
            run.ttft_s.append(report["ttft_ms"] / 1e3 + self._away_s)
            run.e2e_s.append(now_s - sent_s)


def _tokens(step: ProgramStep, first: int) -> list[int]:
    """Returns the prompt's tokens from the block ``first`` on: those of a block follow from its key."""
    tokens: list[int] = []
    for key in step.keys[first:]:
        tokens += np.random.default_rng(list(key[:8])).integers(0, VOCABULARY, BLOCK_TOKENS).tolist()
    rest = step.tokens - (first * BLOCK_TOKENS + len(tokens))
    return tokens + [VOCABULARY - 1] * max(0, rest)
