"""Hit ratios of a running suite, by eviction policy, and of `pinyon simulate-cache` on what it recorded meanwhile.

The built-in model answers chats and calls of programs (`live_load.py`) from small pools. Each run is on a fresh
cluster, the policies alternating; the requests are recorded and replayed with the same policy and capacity. First comes
one mixed worker without a KV store, then the demo's cluster. A second replay keeps the books that one worker keeps
(`live_replay.py`): it differs from that worker by requests that overlap, and by the clock."""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench.live_load import ONLY_LETTERS, Mix, Served, mixed, serve
from bench.live_replay import worker_hits
from bench.report import Aim, Report, parser, progress, summary
from launch.cluster import ClusterSpec, LocalCluster
from launch.process import Launch, start_module
from pinyon.core.trace_hashes import BLOCK_TOKENS
from pinyon_lab.caches.replay import BELADY
from pinyon_lab.traces import TraceFile

POLICIES = ("lru", "reuse_hazard")
QUICK_POLICIES = ("lru", "reuse_hazard:refit_s=1")
"""The short ``refit_s`` is for ten seconds, in which the policy would learn once."""
BURST = 16
PAIRS = 2
STORE_BLOCKS_PER_MIB = 16
"""A block takes 64 KiB: 16 tokens of the built-in model."""
POINTS = 2.0
RECORDER_S = 120.0
"""The time for the recording to begin, and for the recorder to end."""
SIMULATION_S = 60.0


@dataclass(frozen=True)
class Ran:
    """One run. Ratios are percent of the prompts' blocks, of which the last one of each may not be full."""

    requests: int
    in_flight: float
    """The mean number of requests in flight, as the client sees it."""
    live_percent: float
    live_chat_percent: float
    """The percentage of the chats' blocks that hit."""
    simulated_percent: float
    as_worker_percent: float
    belady_percent: float

    @property
    def difference(self) -> float:
        """The points by which the live run hits more often than the simulated one."""
        return self.live_percent - self.simulated_percent


@dataclass(frozen=True)
class Setting:
    """The mix and its cluster: one mixed worker; or ``pairs`` of a prefill and a decode instance, and a store node with
    as much room as one of them."""

    mix: Mix
    seed: int
    pool_blocks: int
    pairs: int = 0
    at_once: int = 4
    engine: str = "numpy"

    @property
    def capacity(self) -> int:
        """The blocks of the instances that compute prompts; other pools hold copies."""
        return max(1, self.pairs) * self.pool_blocks


def measure(choice: str, setting: Setting, launch: Launch = start_module) -> Ran:
    """Serves the mix on a fresh cluster, and simulates it. Raises RuntimeError if not all of it was recorded."""
    spec = ClusterSpec(
        prefill=setting.pairs,
        decode=setting.pairs,
        mixed=0 if setting.pairs else 1,
        stores=1 if setting.pairs else 0,
        store_mib=max(1, setting.pool_blocks // STORE_BLOCKS_PER_MIB),
        engine=setting.engine,
        pool_blocks=setting.pool_blocks,
        block_tokens=BLOCK_TOKENS,
        eviction=choice,
        log_level="warning",
        extra={"conductor": ("--ttft-slo-ms", "0")},  # else some of a burst might be refused
    )
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "live.jsonl"
        served = _recorded(LocalCluster(spec, Path(folder), launch), trace, setting)
        rows = TraceFile(trace).sorted_rows()
        if len(rows) != len(served):
            raise RuntimeError(f"{len(served)} requests were served and {len(rows)} recorded")
        blocks = sum(len(row.blocks) for row in rows)
        return Ran(
            requests=len(served),
            in_flight=sum(each.answered_s - each.sent_s for each in served) / max(each.answered_s for each in served),
            live_percent=_percent(served),
            live_chat_percent=_percent([each for each in served if each.kind == "chat"]),
            simulated_percent=_simulated(trace, choice, setting.capacity),
            as_worker_percent=100 * sum(worker_hits(rows, choice, setting.capacity)) / blocks,
            belady_percent=_simulated(trace, BELADY, setting.capacity),
        )


def _recorded(cluster: LocalCluster, trace: Path, setting: Setting) -> list[Served]:
    recorder: subprocess.Popen[bytes] | None = None
    try:
        with cluster:
            lb = cluster.services["lb-0"]
            command = [sys.executable, "-m", "pinyon.cli", "trace", "record", str(trace)]
            recorder = subprocess.Popen([*command, "--lb", lb.endpoints["grpc"]], stderr=subprocess.DEVNULL)
            deadline_s = time.monotonic() + RECORDER_S
            assert lb.log_path is not None
            while "records a trace" not in lb.log_path.read_text():
                if recorder.poll() is not None or time.monotonic() > deadline_s:
                    raise RuntimeError("the recording did not begin")
                time.sleep(0.02)  # a poll with a deadline
            fields = {"logit_bias": ONLY_LETTERS} if setting.engine == "numpy" else {}
            load = mixed(setting.mix, setting.seed)
            served = asyncio.run(serve(lb.endpoints["http"], load, setting.mix, setting.at_once, fields))
        recorder.wait(RECORDER_S)  # the load balancer has ended, and told the recorder all
    finally:
        if recorder is not None:
            recorder.kill()
            recorder.wait()
    return served


def _percent(served: Sequence[Served]) -> float:
    blocks = sum(-(-each.prompt // BLOCK_TOKENS) for each in served)
    return 100 * sum(each.cached // BLOCK_TOKENS for each in served) / max(1, blocks)


def _simulated(trace: Path, choice: str, capacity: int) -> float:
    command = [sys.executable, "-m", "pinyon.cli", "simulate-cache", str(trace), "--policy", choice, "--json"]
    done = subprocess.run(
        [*command, "--capacity", str(capacity)], check=True, capture_output=True, text=True, timeout=SIMULATION_S
    )
    return 100 * float(json.loads(done.stdout.splitlines()[-1])["hit_ratio"])


def _figures(runs: Sequence[Ran]) -> dict[str, Any]:
    told = [{**asdict(ran), "difference_points": ran.difference} for ran in runs]
    return {name: summary([each[name] for each in told], 2) for name in told[0]}


def _say(choice: str, ran: Ran) -> None:
    progress(
        f"{choice}: {ran.requests} requests, {ran.in_flight:.1f} in flight; live {ran.live_percent:.1f} %, simulated "
        f"{ran.simulated_percent:.1f} % ({ran.difference:+.1f} points), with a worker's books "
        f"{ran.as_worker_percent:.1f} %, belady {ran.belady_percent:.1f} %"
    )


def main() -> None:
    arguments = parser(__doc__).parse_args()
    quick: bool = arguments.quick
    mix = Mix(10.0, chats_per_s=6.0, calls_per_s=30.0, think_s=0.5) if quick else Mix(75.0)
    one = Setting(mix, arguments.seed, pool_blocks=256, engine="instant" if quick else "numpy")
    report = Report("live", {**asdict(one), "quick": quick})
    if quick:
        _compare(report, "one worker", one, 1, QUICK_POLICIES)
    else:
        _compare(report, "one worker", one, 2)
        _compare(report, "the demo's cluster", replace(one, pool_blocks=one.pool_blocks // PAIRS, pairs=PAIRS), 1)
        bursts = replace(one, mix=replace(mix, burst=BURST), at_once=2 * BURST)
        _compare(report, f"one worker, calls {BURST} at a time", bursts, 1, aims=False)
    report.emit()


def _compare(
    report: Report,
    title: str,
    setting: Setting,
    rounds: int,
    policies: tuple[str, str] = POLICIES,
    *,
    aims: bool = True,
) -> None:
    """Measures both policies in turn."""
    runs: dict[str, list[Ran]] = {choice: [] for choice in policies}
    for _ in range(rounds):
        for choice, done in runs.items():
            done.append(measure(choice, setting))
            _say(f"{title}, {choice}", done[-1])
    base, own = runs
    gains = [new.live_percent - old.live_percent for old, new in zip(runs[base], runs[own], strict=True)]
    figures = {choice: _figures(done) for choice, done in runs.items()}
    report.results[title] = {**figures, "gain_points": summary(gains, 2)}
    if not aims:
        return
    for choice, done in runs.items():
        worst = round(max(abs(ran.difference) for ran in done), 2)
        report.aims.append(Aim(f"{title}, {choice}: live hit ratio off the simulated one, points", POINTS, worst))
    gain = round(statistics.median(gains), 2)
    report.aims.append(Aim(f"{title}: {own} over {base}, live, points", 0.0, gain, at_most=False))


if __name__ == "__main__":
    main()
