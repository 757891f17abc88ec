"""How many requests per second are in time under pinyon's own placement, against DualMap, and what each part brings.

Simulated, so nothing here depends on this machine: the plain reference (DualMap's published speed, Qwen2.5-7B: 127 µs
a token) with a million tokens of cache on each instance, whole traces at higher rates, a TTFT limit of 5 s. Nobody is
refused. A goodput counts only where the 99th percentile of the TTFT is at most 35 s and the last quarter of the
requests is in time as often as all, within two points: without these bounds a policy looks better the more it starves.

DualMap comes in its readings: *pending* (what waits against half of the limit, as its published code), *expected* (the
expected TTFT against the limit, as its text), and pending against the whole limit. Traces: Mooncake's conversation, and
two that nothing was tried on: Mooncake's synthetic one, and tool&agent generated from its profile.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from bench.report import Aim, Report, parser, progress
from pinyon.simulator.goodput import Bounds, goodput
from pinyon.simulator.models import Limits, ReferenceModel
from pinyon.simulator.prefill_reference import ReferenceSettings
from pinyon.simulator.reference_memory import FETCH_US, SSD_US, PoolRules
from pinyon.simulator.workload import Arrival, at_rate, cut
from pinyon.traces import FORMATS, TraceFile
from pinyon.traces.generate import generate, profile

CACHE_TOKENS = 1_000_000
SSD_SHARE = 3
TOKENS_MAX = 20_480
LIMITS = Limits(5.0, 0.1, 500)
BOUNDS = Bounds(0.9, 35.0, 0.02)
ROWS = 12_031
"""Of a generated trace, as many as the conversation has."""
QUICK_ROWS = 4_000
OVERLOADS = (1.0, 1.1, 1.25, 1.5)
LITERAL, TEXT, WHOLE = "dualmap, pending", "dualmap, expected", "dualmap, pending against the whole limit"
OWN, OWN_SSD = "pinyon", "pinyon, SSD tier"


@dataclass(frozen=True)
class System:
    """What serves. ``pool``: none, dram or ssd."""

    policy: str
    order: str = "fifo"
    pool: str = "none"


SYSTEMS = {
    LITERAL: System("dualmap:slo_s=5"),
    TEXT: System("dualmap:slo_s=5,reading=expected"),
    WHOLE: System("dualmap:slo_s=5,share=1.0"),
    OWN: System("pinyon", "most_in_time", "dram"),
    OWN_SSD: System("pinyon", "most_in_time", "ssd"),
}
PARTS = {
    "pinyon less the pool": System("pinyon:fetch=false", "most_in_time"),
    "pinyon less the order of service": System("pinyon", "fifo", "dram"),
    "pinyon less looking at the order": System("pinyon:order=false", "most_in_time", "dram"),
    "pinyon less the time of others": System("pinyon:others=0", "most_in_time", "dram"),
    "pinyon less pairs": System("pinyon:pair=false", "most_in_time", "dram"),
    "pinyon by the shortest in time": System("pinyon", "shortest_in_time", "dram"),
    "least TTFT, pool, most in time": System("min_ttft", "most_in_time", "dram"),
    "kvcache_centric, pool, most in time": System("kvcache_centric", "most_in_time", "dram"),
    "dualmap, expected, most in time": System("dualmap:slo_s=5,reading=expected", "most_in_time"),
    "dualmap, expected, pool": System("dualmap:slo_s=5,reading=expected", "fifo", "dram"),
    "dualmap, expected, pool, most in time": System("dualmap:slo_s=5,reading=expected", "most_in_time", "dram"),
    "dualmap, expected, without rebalancing": System("dualmap:slo_s=5,reading=expected,rebalance=false"),
}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--traces", type=Path, default=Path("../shared/traces"), help="where Mooncake's traces are")
    options.add_argument("--workers", type=int, default=2, help="processes (default 2)")
    arguments = options.parse_args()
    seed: int = arguments.seed
    rows = QUICK_ROWS if arguments.quick else ROWS
    traces = {name: path for name, path in _traces(arguments.traces).items() if path is not None or name == "toolagent"}
    if arguments.quick:
        traces = {name: traces[name] for name in list(traces)[:1]}
    sizes = (8,) if arguments.quick else (8, 32)
    report = Report("goodput", {"seed": seed, "rows": rows, "cache_tokens": CACHE_TOKENS, "traces": sorted(traces)})
    asked = [
        (trace, path, rows, seed, size, name, system)
        for trace, path in traces.items()
        for size in sizes
        for name, system in {**SYSTEMS, **(PARTS if size == sizes[0] and not arguments.quick else {})}.items()
        if not (arguments.quick and name not in (LITERAL, TEXT, OWN))
    ]
    with ProcessPoolExecutor(arguments.workers) as processes:
        for (trace, _, _, _, size, name, _), figures in zip(asked, processes.map(_goodput, asked), strict=True):
            report.results[f"{trace}, {size} instances, {name}"] = figures
            progress(f"{trace}, {size} instances, {name}: {figures}")
        points = [(trace, path, rows, seed) for trace, path in traces.items()]
        for (trace, *_), figures in zip(points, processes.map(_further, points), strict=True):
            report.results[f"{trace}, further"] = figures
            progress(f"{trace}, further: {figures}")
    _aims(report, list(traces), sizes, quick=arguments.quick)
    report.emit()


def _traces(folder: Path) -> dict[str, Path | None]:
    files = {"conversation": "mooncake_conversation.jsonl.gz", "synthetic": "mooncake_synthetic.jsonl.gz"}
    found: dict[str, Path | None] = {}
    for name, file in files.items():
        found[name] = folder / file if (folder / file).is_file() else None
        if found[name] is None:
            progress(f"{name} is left out: no {folder / file} (--traces)")
    return {**found, "toolagent": None}


def _arrivals(path: Path | None, rows: int, seed: int) -> tuple[Sequence[Arrival], int]:
    if path is None:
        made = profile("toolagent")
        block_tokens = FORMATS[made.format].block_tokens
        return cut(list(islice(generate(made, seed), rows)), block_tokens, TOKENS_MAX), block_tokens
    trace = TraceFile(path)
    block_tokens = trace.format.block_tokens
    return cut(trace.sorted_rows(rows, lambda _: None), block_tokens, TOKENS_MAX), block_tokens


def _model(system: System, size: int, block_tokens: int, seed: int) -> ReferenceModel:
    pool = None
    if system.pool == "dram":
        pool = PoolRules(FETCH_US)
    elif system.pool == "ssd":
        pool = PoolRules(FETCH_US, SSD_US, SSD_SHARE * CACHE_TOKENS // block_tokens)
    settings = ReferenceSettings(size, CACHE_TOKENS, block_tokens, LIMITS.slo_s, seed=seed, pool=pool)
    return ReferenceModel(settings, system.policy, system.order)


def _figures(rate: float, report: dict[str, float]) -> dict[str, float]:
    return {
        "requests_s": round(rate, 3),
        "attainment": round(report["attainment"], 4),
        "attainment_last_quarter": round(report["attainment_last_quarter"], 4),
        "attainment_longest_tenth": round(report["attainment_longest_tenth"], 4),
        "p50_s": round(report["p50_s"], 3),
        "p99_s": round(report["p99_s"], 2),
        "hit_ratio": round(report["hit_ratio"], 4),
    }


def _goodput(asked: tuple[str, Path | None, int, int, int, str, System]) -> dict[str, float]:
    _, path, rows, seed, size, _, system = asked
    arrivals, block_tokens = _arrivals(path, rows, seed)
    model = _model(system, size, block_tokens, seed)

    def served_at(rate: float) -> dict[str, float]:
        return model.report(model.run(at_rate(arrivals, rate), lambda _: None), LIMITS)

    return _figures(*goodput(served_at, BOUNDS.hold, float(size), "enough requests in time"))


def _further(asked: tuple[str, Path | None, int, int]) -> dict[str, Any]:
    """On eight instances: at eight requests a second, past saturation, and the longest prompts by the order of
    service."""
    _, path, rows, seed = asked
    arrivals, block_tokens = _arrivals(path, rows, seed)

    def at(system: System, rate: float) -> dict[str, float]:
        model = _model(system, 8, block_tokens, seed)
        return _figures(rate, model.report(model.run(at_rate(arrivals, rate), lambda _: None), LIMITS))

    own, fifo = SYSTEMS[OWN], PARTS["pinyon less the order of service"]
    served = _goodput(("", path, rows, seed, 8, "", own))["requests_s"]
    in_turn = _goodput(("", path, rows, seed, 8, "", fifo))["requests_s"]
    return {
        "pinyon at 8 requests/s": at(own, 8.0),
        "dualmap, pending, at 8 requests/s": at(SYSTEMS[LITERAL], 8.0),
        "dualmap, expected, at 8 requests/s": at(SYSTEMS[TEXT], 8.0),
        "in time per second by load": {
            name: [round(served * each * at(system, served * each)["attainment"], 3) for each in OVERLOADS]
            for name, system in ((OWN, own), ("pinyon less the order of service", fifo), (TEXT, SYSTEMS[TEXT]))
        },
        "longest tenth at fifo's goodput": {
            "fifo": at(fifo, in_turn)["attainment_longest_tenth"],
            "most_in_time": at(own, in_turn)["attainment_longest_tenth"],
        },
        "longest tenth at pinyon's goodput": {
            "fifo": at(fifo, served)["attainment_longest_tenth"],
            "most_in_time": at(own, served)["attainment_longest_tenth"],
        },
    }


def _aims(report: Report, traces: Sequence[str], sizes: Sequence[int], *, quick: bool) -> None:
    def served(trace: str, size: int, name: str) -> float:
        figures = report.results.get(f"{trace}, {size} instances, {name}")
        return 0.0 if figures is None else float(figures["requests_s"])

    for trace in traces:
        for size in sizes:
            stronger = max(served(trace, size, name) for name in (LITERAL, TEXT, WHOLE))
            own, ssd = served(trace, size, OWN), served(trace, size, OWN_SSD)
            where = f"{trace}, {size} instances: goodput"
            report.aims.append(Aim(f"{where}, of the stronger reading's", 1.10, own / stronger, at_most=False))
            literal = own / served(trace, size, LITERAL)
            report.aims.append(Aim(f"{where}, of the published code's reading", 1.16, literal, at_most=False))
            if not quick:
                report.aims.append(
                    Aim(f"{where}, with SSDs, of the stronger reading's", 1.18, ssd / stronger, at_most=False)
                )
        further = report.results[f"{trace}, further"]
        if trace == "conversation":
            median = further["pinyon at 8 requests/s"]["p50_s"]
            report.aims.append(Aim(f"{trace}, 8 instances, 8 requests/s: median TTFT, s", 0.7, median))
        loads = further["in time per second by load"][OWN]
        report.aims.append(
            Aim(
                f"{trace}: in time per second at one and a half of the goodput, of its own",
                1.0,
                loads[-1] / loads[0],
                at_most=False,
            )
        )
        for when in ("fifo's", "pinyon's"):
            tenth = further[f"longest tenth at {when} goodput"]
            behind = 100 * (tenth["fifo"] - tenth["most_in_time"])
            report.aims.append(Aim(f"{trace}: longest tenth behind FIFO at {when} goodput, points", 5.0, behind))


if __name__ == "__main__":
    main()
