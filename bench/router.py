"""The load balancer in front of other people's inference servers (``--upstream``) beside vllm-router and sglang-router.

All three choose by prefix, in front of four stub servers each, which compute nothing and count what a prefix cache
would have had. Half of each prompt is one of 64 shared beginnings, the other half is its own. No prompt comes twice, no
more than half of it can be hit, and one server's cache has no room for all beginnings. CPU is that of the router's
process per request, by the scheduler's accounting. Work that it gives to servers besides is not in it, but its other
calls are counted. Added latency is against such requests sent to the stubs in turn, without a router: their hits are
round robin's. All take turns within a run.

Then, for ours: memory over many distinct prompts, and 2,000 streams at once."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import json
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.load import HttpClient, cpu_seconds, http_request, run_closed_loop
from bench.peers import PeerUnavailable
from bench.report import Aim, Report, number, parser, percentile, progress, summary
from bench.router_prompts import GROUPS, Prompts
from bench.router_sides import LEVELS, PEERS, SERVERS, Side, peer_side, pinyon_side, running_stubs
from bench.router_stub import CHUNK_BYTES, MODEL

SIZES_KB = (8, 32)
CONCURRENCY = 16
CACHE_HALVES = 96
"""The halves of prompts that a server's cache holds: enough for its share of the beginnings, and not for all."""
STREAMS = 2000
DISTINCT = 1_000_000
DISTINCT_BYTES = 1024
ROUND_ROBIN = "round_robin"
"""The name of the stubs' figures for requests that were sent to them in turn."""
POINTS = 10
"""The number of points at which memory is measured."""
GROWTH_AIM = 0.05
ADDED_AIM_US = 400.0
CPU_AIM_US = 100.0
"""The aim for a whole answer to a prompt of 8 KB, whatever the peers take."""
HELD_AIM_US = 10_000.0
"""The aim for what is added to the rest of a stream, p99. A router that holds the tail until earlier data is
acknowledged adds 40 ms; less is due to other work on the machine."""
QUICK_MEMORY_S = 5.0


async def turn(side: Side, prompts: Prompts, count: int, figures: dict[str, list[float]]) -> None:
    """Runs one repetition of one side."""
    clients = [HttpClient(side.entry(number_)) for number_ in range(CONCURRENCY)]
    turns = itertools.count()
    try:
        for concurrency in (1, CONCURRENCY):
            requests = prompts.requests(side.address, count // 2 if concurrency == 1 else count)
            following = iter(requests)
            gc.collect()
            cpu_s = cpu_seconds([side.pid]) if side.pid else 0.0

            async def send(number_: int, following: Iterator[bytes] = following, alone: bool = concurrency == 1) -> Any:
                return await clients[next(turns) % SERVERS if alone else number_].send(next(following))

            samples = await run_closed_loop(send, len(requests), concurrency)
            if concurrency > 1 and side.pid:
                figures.setdefault("cpu_us_per_request", []).append(
                    (cpu_seconds([side.pid]) - cpu_s) / len(requests) * 1e6
                )
            if concurrency == 1:
                for percent in (50, 99):
                    first = percentile([sample.first_byte_s for sample in samples], percent) * 1e6
                    figures.setdefault(f"first_byte_p{percent}_us", []).append(first)
                    rest = percentile([sample.total_s - sample.first_byte_s for sample in samples], percent) * 1e6
                    figures.setdefault(f"rest_p{percent}_us", []).append(rest)
    finally:
        for client in clients:
            client.close()


async def measure(
    direct: Side, sides: list[Side], size_kb: int, stream: bool, quick: bool, seed: int
) -> dict[str, dict[str, Any]]:
    """Returns by side: CPU, added latency, and hit ratio."""
    repetitions = 2 if quick else 5
    count = (80 if size_kb == SIZES_KB[0] else 40) if quick else 400
    figures: dict[str, dict[str, list[float]]] = {side.name: {} for side in (direct, *sides)}
    everyone = (direct, *sides)
    for side in everyone:
        side.resize(CACHE_HALVES * size_kb * 512 // CHUNK_BYTES)
    sent = {side.name: 0 for side in everyone}
    prompts = {side.name: Prompts(seed, size_kb << 10, stream) for side in (direct, *sides)}
    ignored: dict[str, list[float]] = {}
    for side in everyone:
        await turn(side, prompts[side.name], GROUPS if quick else 4 * GROUPS, ignored)
    before = {side.name: side.stats() for side in everyone}
    for _ in range(repetitions):
        for side in everyone:
            await turn(side, prompts[side.name], count, figures[side.name])
            sent[side.name] += count + count // 2
    found: dict[str, dict[str, Any]] = {ROUND_ROBIN: _counted(direct, before[direct.name], sent[direct.name])}
    plain = figures[direct.name]
    for side in sides:
        mine = figures[side.name]
        result: dict[str, Any] = {"cpu_us_per_request": summary(mine["cpu_us_per_request"])}
        for what, percent in itertools.product(("first_byte", "rest") if stream else ("first_byte",), (50, 99)):
            key = f"{what}_p{percent}_us"
            added = [one - other for one, other in zip(mine[key], plain[key], strict=True)]
            result[f"added_{'rest_' if what == 'rest' else ''}p{percent}_us"] = summary(added)
        result |= _counted(side, before[side.name], sent[side.name])
        found[side.name] = result
    return found


def _counted(side: Side, before: dict[str, int], sent: int) -> dict[str, float]:
    """Returns what a side's servers saw. Raises RuntimeError for impossible counts: then the measurement is wrong."""
    now = side.stats()
    requests, others, asked, hits = [now[name] - before[name] for name in ("requests", "others", "asked", "hits")]
    if requests != sent:
        raise RuntimeError(f"{side.name}: {sent} requests were sent, and its servers got {requests}")
    if not 0 <= hits <= asked / 2:
        raise RuntimeError(f"{side.name}: {hits} hits of {asked}, and half of each prompt is new")
    return {"hit_ratio": round(hits / asked, 4), "other_calls_per_request": round(others / requests, 2)}


async def memory(side: Side, distinct: int, limit_s: float, seed: int) -> dict[str, Any]:
    """Measures the memory of the router's process while prompts come of which no two begin alike."""
    random_ = random.Random(seed)
    clients = [HttpClient(side.address) for _ in range(CONCURRENCY)]
    resident = [side.resident_bytes]
    counts = [0]
    began_s = time.monotonic()
    part = max(CONCURRENCY, distinct // POINTS)
    rest = http_request(side.address, "/v1/completions", {"model": MODEL, "prompt": "@" * DISTINCT_BYTES})
    try:
        while counts[-1] < distinct and time.monotonic() - began_s < limit_s:

            async def send(client: int) -> Any:
                text = random_.randbytes(DISTINCT_BYTES // 2).hex().encode()
                return await clients[client].send(rest.replace(b"@" * DISTINCT_BYTES, text))

            size = part if limit_s > 60 else min(part, 2000)
            await run_closed_loop(send, size, CONCURRENCY)
            counts.append(counts[-1] + size)
            resident.append(side.resident_bytes)
    finally:
        for client in clients:
            client.close()
    half = next(at for at, count in enumerate(counts) if count >= counts[-1] / 2)
    return {
        "distinct_prompts": counts[-1],
        "resident_mib": [round(each / 2**20, 1) for each in resident],
        "last_half_growth_ratio": round(resident[-1] / resident[half] - 1, 4),
        "requests_per_s": round(counts[-1] / (time.monotonic() - began_s)),
    }


async def streams(side: Side, count: int, seed: int) -> dict[str, Any]:
    """Runs ``count`` streams at once, none of which ends before all are there."""
    random_ = random.Random(seed)
    shared = [random_.randbytes(2048).hex() for _ in range(GROUPS)]
    base, base_bytes = side.stats(), side.resident_bytes
    began_s, cpu_s = time.monotonic(), cpu_seconds([side.pid])
    all_here = asyncio.Event()
    arrived = served = 0
    host, _, port = side.address.rpartition(":")

    async def one(at: int) -> None:
        nonlocal arrived, served
        body = {"model": MODEL, "prompt": shared[at % GROUPS] + random_.randbytes(512).hex(), "stream": True,
                "stub_hold": True}  # fmt: skip
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(http_request(side.address, "/v1/completions", body))
            head = await reader.readuntil(b"\r\n\r\n")
            if not head.startswith(b"HTTP/1.1 200"):
                return
            await reader.readuntil(b"data: ")
            arrived += 1
            if arrived == count:
                all_here.set()
            await reader.readuntil(b"[DONE]")
            served += 1
        finally:
            writer.close()

    tasks = [asyncio.ensure_future(one(at)) for at in range(count)]
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(all_here.wait(), 60)
    all_s, most, held = time.monotonic() - began_s, side.stats()["running"], side.resident_bytes
    await asyncio.to_thread(side.release)
    await asyncio.gather(*tasks, return_exceptions=True)
    after = side.stats()
    return {
        "asked": count,
        "at_once": most,
        "served": served,
        "until_all_run_s": round(all_s, 2),
        "cpu_us_per_stream": round((cpu_seconds([side.pid]) - cpu_s) / count * 1e6),
        "kib_per_stream": round((held - base_bytes) / count / 1024, 1),
        "hit_ratio": round((after["hits"] - base["hits"]) / max(1, after["asked"] - base["asked"]), 4),
    }


async def run(quick: bool, seed: int, distinct: int) -> Report:
    report = Report(
        "router",
        {
            "servers": SERVERS, "shared_beginnings": GROUPS, "concurrency": CONCURRENCY, "seed": seed, "quick": quick,
            "log_levels": LEVELS,
            "peers": {name: requirement for name, (requirement, _) in PEERS.items()},
        },
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as logs, running_stubs(2 + len(PEERS)) as stubs, contextlib.ExitStack() as stack:
        direct = Side("direct", stubs[0][0], stubs[0])
        ours = stack.enter_context(pinyon_side(stubs[1], Path(logs)))
        sides = [ours]
        for name, own in zip(PEERS, stubs[2:], strict=True):
            try:
                sides.append(stack.enter_context(peer_side(name, own, Path(logs))))
            except (PeerUnavailable, RuntimeError) as error:
                report.baseline[name] = {"unavailable": str(error)}
        for size_kb, stream in itertools.product(SIZES_KB, (False, True)):
            key = f"{size_kb}kb_{'stream' if stream else 'whole'}"
            found = await measure(direct, sides, size_kb, stream, quick, seed)
            report.results[key] = found.pop(ours.name)
            report.baseline[key] = found
            _tell(key, {ours.name: report.results[key], **found})
            report.aims += _aims(
                key, report.results[key], [each for name, each in found.items() if name != ROUND_ROBIN]
            )
        limit_s = QUICK_MEMORY_S if quick else 1200.0
        report.results["memory"] = await memory(ours, distinct, limit_s, seed)
        reached = report.results["memory"]["distinct_prompts"] >= DISTINCT
        report.aims.append(
            Aim(
                "memory: growth over the last half of 1,000,000 distinct prompts, ratio",
                GROWTH_AIM,
                report.results["memory"]["last_half_growth_ratio"] if reached else None,
                reason="" if reached else f"{report.results['memory']['distinct_prompts']} came in the time there was",
            )
        )
        progress(f"memory: {json.dumps(report.results['memory'])}")
        report.results["streams"] = found_streams = await streams(ours, STREAMS, seed)
        report.aims.append(Aim("streams at once, served", STREAMS, found_streams["served"], at_most=False))
        progress(f"streams: {json.dumps(found_streams)}")
    return report


def _aims(key: str, ours: dict[str, Any], peers: list[dict[str, Any]]) -> list[Aim]:
    """Returns the aims of one cell."""
    added_us = ours["added_p50_us"]["median"]
    aims = [Aim(f"{key}: added to the first byte, p50, us", ADDED_AIM_US, added_us)]
    if (rest := ours.get("added_rest_p99_us")) is not None:
        aims.append(Aim(f"{key}: added to the rest of a stream, p99, us", HELD_AIM_US, rest["median"]))
    if key == f"{SIZES_KB[0]}kb_whole":
        aims.append(Aim(f"{key}: CPU, us per request", CPU_AIM_US, ours["cpu_us_per_request"]["median"]))
    if peers:
        hits = max(each["hit_ratio"] for each in peers)
        cpu_us = min(each["cpu_us_per_request"]["median"] for each in peers)
        aims.append(Aim(f"{key}: CPU, us per request, the better peer's", cpu_us, ours["cpu_us_per_request"]["median"]))
        aims.append(
            Aim(f"{key}: hit ratio, 98 % of the better peer's", round(0.98 * hits, 4), ours["hit_ratio"], at_most=False)
        )
    return aims


def _tell(key: str, found: dict[str, dict[str, Any]]) -> None:
    for name, each in found.items():
        if name == ROUND_ROBIN:
            progress(f"{key}: in turn: hits {each['hit_ratio']:.3f}")
            continue
        rest = [each[f"added_rest_p{percent}_us"]["median"] for percent in (50, 99) if "added_rest_p50_us" in each]
        progress(
            f"{key}: {name}: CPU {each['cpu_us_per_request']['median']:.0f} us, added p50 "
            f"{each['added_p50_us']['median']:.0f} p99 {each['added_p99_us']['median']:.0f} us, "
            + (f"to the rest {rest[0]:.0f} p99 {rest[1]:.0f} us, " if rest else "")
            + f"hits {each['hit_ratio']:.3f}, other calls {each['other_calls_per_request']}"
        )


def main() -> None:
    options = parser(__doc__)
    options.add_argument(
        "--distinct", type=number(1000, 100_000_000), default=DISTINCT, help="distinct prompts for memory"
    )
    arguments = options.parse_args()
    report = run(arguments.quick, arguments.seed, arguments.distinct)
    asyncio.run(report).emit()


if __name__ == "__main__":
    main()
