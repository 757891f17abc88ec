"""The cost of a placement in a conductor that is its own process. A load balancer streams batches of requests to it,
and instances report what became of them and what they hold now.

A prompt has 512 blocks of 16 tokens, the first half held by some instance, the rest by none; no prompt comes twice. The
instance tells of a placement in three reports: the request came; it was computed, with the cache events; it has ended.
The oldest blocks go as new ones come. CPU is that of the conductor's process, all threads, by the scheduler's
accounting. Placements per second are as many as that CPU allows on one core. With ``--python`` a second conductor, with
clocks in it, measures the parts."""

from __future__ import annotations

import json
import signal
import tempfile
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from bench.conductor_peers import PROFILE, PROMPT_BLOCKS, Peers
from bench.conductor_timed import PARTS
from bench.load import cpu_seconds
from bench.report import Aim, Report, number, parser, percentile, progress, summary
from launch.process import ServiceProcess
from services.conductor import intake

PLACEMENTS_MIN = 5000.0
"""The aim in placements per second on one core, in batches of :data:`HEADLINE`."""
HEADLINE = 64
BATCHES = (1, 16, HEADLINE)
WINDOW = 4
"""The messages in flight; of messages with one request, 16 times as many (the smallest larger batch)."""
BEGINNINGS = 4000
START_S = 60.0


@asynccontextmanager
async def running(
    folder: Path, instances: int, seed: int, timed: Path | None = None
) -> AsyncGenerator[tuple[ServiceProcess, Peers], None]:
    """Runs a conductor with peers that have told it what they hold; with ``timed``, its clocks are in that file."""
    arguments = ["--listen", "127.0.0.1:0", "--settle-ms", "0", "--profile", PROFILE, "--log-level", "warning"]
    arguments += ["--instances-max", str(max(512, instances))]
    module = "services.conductor"
    if timed is not None:
        module, arguments = "bench.conductor_timed", [str(timed), *arguments]
    conductor = ServiceProcess("conductor", module, arguments, folder / "conductor.log")
    conductor.spawn()
    try:
        conductor.wait_ready(time.monotonic() + START_S)
        peers = Peers(conductor.endpoints["grpc"], instances, BEGINNINGS, seed)
        try:
            await peers.start()
            yield conductor, peers
        finally:
            await peers.close()
            conductor.signal(signal.SIGTERM)
            conductor.wait(START_S)
    finally:
        conductor.kill()


async def measure(folder: Path, instances: int, quick: bool, seed: int) -> dict[str, Any]:
    """Returns the figures by batch size; the sizes take turns."""
    count, repetitions = (960, 2) if quick else (2880, 5)
    figures: dict[int, dict[str, list[float]]] = {batch: {} for batch in BATCHES}
    async with running(folder, instances, seed) as (conductor, peers):
        pid = conductor.pid
        await peers.place(2 * count, HEADLINE, WINDOW)  # until as many blocks are evicted as stored
        for _ in range(repetitions):
            for batch in BATCHES:
                window = WINDOW if batch > 1 else WINDOW * min(BATCHES[1:])
                requests = count if batch > 1 else count // 4
                reports, blocks = peers.reports, peers.changed_blocks
                cpu_s, main_s, began_s = cpu_seconds([pid]), _main_s(pid), time.perf_counter()
                done = await peers.place(requests, batch, window)
                cpu_us = (cpu_seconds([pid]) - cpu_s) / requests * 1e6
                wall_s = time.perf_counter() - began_s
                if done.refused:
                    raise RuntimeError(f"{done.refused} of {requests} requests were refused: {done.error}")
                for name, value in {
                    "cpu_us_per_placement": cpu_us,
                    "cpu_of_other_threads_us_per_placement": cpu_us - (_main_s(pid) - main_s) / requests * 1e6,
                    "placements_per_s_of_one_core": 1e6 / cpu_us,
                    "placements_per_s_by_the_clock": requests / wall_s,
                    "answer_p50_ms": percentile(done.latencies_s, 50) * 1e3,
                    "reports_per_placement": (peers.reports - reports) / requests,
                    "changed_blocks_per_placement": (peers.changed_blocks - blocks) / requests,
                    "fetching_percent": 100 * done.fetching / requests,
                    "local_blocks": done.reused_blocks / requests,
                }.items():
                    figures[batch].setdefault(name, []).append(value)
    return {
        f"batches of {batch}": {name: summary(values, 2) for name, values in figures[batch].items()}
        for batch in BATCHES
    }


async def itemise(folder: Path, instances: int, quick: bool, seed: int) -> dict[str, float]:
    """Returns the CPU µs per placement by part, in batches of :data:`HEADLINE`, from a conductor with clocks in it. The
    rest is the transport: gRPC, its threads and the event loop."""
    count = 1920 if quick else 7680
    said = folder / "clocks"
    async with running(folder, instances, seed, said) as (conductor, peers):
        await peers.place(count // 2, HEADLINE, WINDOW)
        clocks = np.memmap(said, np.float64, "r")
        cpu_s, before_s = cpu_seconds([conductor.pid]), clocks.copy()
        await peers.place(count, HEADLINE, WINDOW)
        all_us = (cpu_seconds([conductor.pid]) - cpu_s) / count * 1e6
        us = dict(zip(PARTS, ((clocks - before_s) / count * 1e6).tolist(), strict=True))
    parts = {
        "decision": us["decision"],
        "request from its message": us["request from its message"],
        "placement to its message": us["placement to its message"],
        "events": us["events"],
        "reports besides": us["reports"] - us["events"],
        "messages read": us["messages read"],
        "messages written": us["messages written"],
    }
    placed = parts["decision"] + parts["request from its message"] + parts["placement to its message"]
    parts["placing besides"] = us["placing"] - placed
    parts["transport"] = all_us - sum(parts.values())
    return {part: round(value, 1) for part, value in {**parts, "all, with clocks": all_us}.items()}


def _main_s(pid: int) -> float:
    """Returns the CPU seconds of the thread with the event loop."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


async def run(instances: Sequence[int], quick: bool, seed: int) -> Report:
    report = Report("conductor", {"prompt_blocks": PROMPT_BLOCKS, "window": WINDOW, "seed": seed, "quick": quick})
    for each in instances:
        with tempfile.TemporaryDirectory() as folder:
            figures = await measure(Path(folder), each, quick, seed)
            if Path(str(intake.__file__)).suffix == ".py":  # no clocks can be put into machine code
                figures["parts_us_per_placement"] = await itemise(Path(folder), each, quick, seed)
        name = f"{each} instances"
        report.results[name] = figures
        progress(f"{name}: {json.dumps(figures, indent=1)}")
        median = figures[f"batches of {HEADLINE}"]["placements_per_s_of_one_core"]["median"]
        aim = f"{name}, batches of {HEADLINE}: placements per second on one core"
        report.aims.append(Aim(aim, PLACEMENTS_MIN, median, at_most=False))
    return report


def main() -> None:
    options = parser(__doc__)
    options.add_argument(
        "--instances", type=number(1, 4096), action="append", default=[], help="(may be repeated; default 32)"
    )
    arguments = options.parse_args()
    uvloop.run(run(arguments.instances or [32], arguments.quick, arguments.seed)).emit()


if __name__ == "__main__":
    main()
