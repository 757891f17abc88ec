"""The requests per second in time under pinyon's own placement, against DualMap and the strongest of its baselines, and
the gain by each part.

All is simulated, so nothing here depends on this machine. The plain reference (DualMap's published speed, Qwen2.5-7B:
127 µs a token) has a million tokens of cache on each instance. It serves whole traces at higher rates, with a TTFT
limit of 5 s, and refuses no request. A goodput counts only where the 99th percentile of the TTFT is at most 35 s. The
last quarter of the requests must be in time as often as all, within two points. Without these bounds a policy looks
better the more it starves.

The whole takes about three quarters of an hour of CPU time in Python; two processes share it. Each result is printed as
soon as it is there, and Ctrl-C ends the run with the results so far. Options make the documentation's other numbers:
--p99 10, --hash-seed, --systems for parts on other traces and sizes, and --rates for these at given rates.

DualMap comes in its readings. The *pending* one compares what waits with half of the limit, the bound of its published
code, or with the whole limit. The *expected* one compares the expected TTFT with the limit, as its text does. All have
the published code's bounds of hot prefixes and serve requests as they come (that code dispatches from a heap, which is
not here). Preble and min_ttft are baselines of DualMap's paper. Traces: Mooncake's conversation, and two that nothing
was tried on: Mooncake's synthetic one, and tool&agent generated from its profile.

The pool keeps each block in one place, moves it and never copies it, and its links never congest."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from signal import SIG_DFL, SIGINT, signal
from time import monotonic
from typing import Any

from bench.report import Aim, Report, number, parser, progress
from pinyon.core.errors import InvalidArgument
from pinyon_lab.simulator.models import ReferenceModel, RunLimits
from pinyon_lab.simulator.prefill_reference import ReferenceSettings
from pinyon_lab.simulator.reference_memory import FETCH_US, SSD_US, PoolRules
from pinyon_lab.simulator.searches import Bounds, goodput
from pinyon_lab.simulator.workload import Arrival, at_rate, cut
from pinyon_lab.traces import FORMATS, TraceFile
from pinyon_lab.traces.generate import generate, profile

CACHE_TOKENS = 1_000_000
SSD_SHARE = 3
TOKENS_MAX = 20_480
LIMITS = RunLimits(5.0, 0.1, 500)
BOUNDS = Bounds(0.9, 35.0, 0.02)
ROWS = 12_031
"""The rows of a generated trace, as many as the conversation has."""
QUICK_ROWS = 4_000
LIMIT_S = 1700.0
"""The time for all of it; results that are not there by then are left out."""
STARTS = {"conversation": 1.0, "synthetic": 1.2, "toolagent": 2.2}
"""The requests per second and instance from which the search goes. They are below most goodputs, since an overloaded
run takes longest: a policy that moves waiting requests goes through queues of hundreds at each arrival."""
STEP = 1.1
RATE_MAX = 1e6
OVERLOADS = (1.0, 1.1, 1.25, 1.5)
LEAST = 0.25
"""The share of the first rate at which the search ends."""
LITERAL, TEXT, WHOLE = "dualmap, pending", "dualmap, expected", "dualmap, pending against the whole limit"
READINGS = (LITERAL, TEXT, WHOLE)
PREBLE, SOONEST = "preble", "least TTFT"
OWN, OWN_SSD = "pinyon", "pinyon, SSD tier"
IN_TURN = "pinyon less the order of service"


@dataclass(frozen=True)
class System:
    """A policy and its order of service; ``pool`` is none, dram or ssd."""

    policy: str
    order: str = "fifo"
    pool: str = "none"


SYSTEMS = {
    LITERAL: System("dualmap:slo_s=5"),
    TEXT: System("dualmap:slo_s=5,reading=expected"),
    WHOLE: System("dualmap:slo_s=5,share=1.0"),
    PREBLE: System("preble"),
    SOONEST: System("min_ttft"),
    OWN: System("pinyon", "most_in_time", "dram"),
    OWN_SSD: System("pinyon", "most_in_time", "ssd"),
}
PARTS = {
    "pinyon less the pool": System("pinyon:fetch=false", "most_in_time"),
    IN_TURN: System("pinyon", "fifo", "dram"),
    "pinyon less looking at the order": System("pinyon:order=false", "most_in_time", "dram"),
    "pinyon less the time of others": System("pinyon:others=0", "most_in_time", "dram"),
    "pinyon less pairs": System("pinyon:pair=false", "most_in_time", "dram"),
    "pinyon by the shortest in time": System("pinyon", "shortest_in_time", "dram"),
    "pinyon, all the time for those late for long": System("pinyon", "most_in_time:aged_share=1", "dram"),
    "preble, most in time": System("preble", "most_in_time"),
    "least TTFT, most in time": System("min_ttft", "most_in_time"),
    "least TTFT, pool": System("min_ttft", "fifo", "dram"),
    "least TTFT, pool, most in time": System("min_ttft", "most_in_time", "dram"),
    "kvcache_centric, pool, most in time": System("kvcache_centric", "most_in_time", "dram"),
    "dualmap, the text's bounds of hot prefixes too": System("dualmap:slo_s=5,reading=expected,hotness=text"),
    "dualmap, expected, most in time": System("dualmap:slo_s=5,reading=expected", "most_in_time"),
    "dualmap, expected, pool": System("dualmap:slo_s=5,reading=expected", "fifo", "dram"),
    "dualmap, expected, pool, most in time": System("dualmap:slo_s=5,reading=expected", "most_in_time", "dram"),
    "dualmap, expected, without rebalancing": System("dualmap:slo_s=5,reading=expected,rebalance=false"),
}
SYSTEMS_ALL = {**SYSTEMS, **PARTS}
HASHING = ("dualmap", "pinyon")
"""The policies whose pairs have a seed."""


@dataclass(frozen=True)
class _Trace:
    """A trace; ``path`` is its file, if it has one. ``hash_seed`` is of the pairs of the system that serves it."""

    name: str
    path: Path | None
    rows: int
    seed: int
    hash_seed: int = 0

    def arrivals(self) -> tuple[Sequence[Arrival], int]:
        """Returns the arrivals, and the number of tokens in a block."""
        if self.path is None:
            made = profile("toolagent")
            block_tokens = FORMATS[made.format].block_tokens
            return cut(list(islice(generate(made, self.seed), self.rows)), block_tokens, TOKENS_MAX), block_tokens
        trace = TraceFile(self.path)
        block_tokens = trace.format.block_tokens
        return cut(trace.sorted_rows(self.rows, lambda _: None), block_tokens, TOKENS_MAX), block_tokens

    def model(self, system: System, size: int, block_tokens: int) -> ReferenceModel:
        pool = None
        if system.pool == "dram":
            pool = PoolRules(FETCH_US)
        elif system.pool == "ssd":
            pool = PoolRules(FETCH_US, SSD_US, SSD_SHARE * CACHE_TOKENS // block_tokens)
        settings = ReferenceSettings(size, CACHE_TOKENS, block_tokens, LIMITS.slo_s, seed=self.seed, pool=pool)
        return ReferenceModel(settings, _hashed(system.policy, self.hash_seed), system.order)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--traces", type=Path, default=Path("../shared/traces"), help="where Mooncake's traces are")
    options.add_argument("--only", nargs="+", choices=tuple(STARTS), default=tuple(STARTS), help="these traces")
    options.add_argument("--sizes", nargs="+", type=number(1, 1024), default=(8, 32), help="instances (default 8 32)")
    options.add_argument(
        "--systems", nargs="+", choices=tuple(SYSTEMS_ALL), metavar="NAME", help="these, on every trace and size"
    )
    options.add_argument("--rates", nargs="+", type=_rate, default=(), help="these, in requests/s, and no goodput")
    options.add_argument("--p99", type=float, default=BOUNDS.p99_s, help="bound of the 99th percentile, s (default 35)")
    options.add_argument("--hash-seed", type=number(0, 1 << 32), default=0, help="of the pairs (default 0)")
    options.add_argument("--workers", type=int, default=2, help="processes (default 2)")
    arguments = options.parse_args()
    seed: int = arguments.seed
    bounds = replace(BOUNDS, p99_s=arguments.p99)
    rows = QUICK_ROWS if arguments.quick else ROWS
    traces = {name: path for name, path in _traces(arguments.traces).items() if name in arguments.only}
    sizes: tuple[int, ...] = tuple(arguments.sizes)
    if arguments.quick:
        traces, sizes = dict(list(traces.items())[:1]), (8,)
    config = {"seed": seed, "hash_seed": arguments.hash_seed, "p99_s": bounds.p99_s, "rows": rows}
    report = Report("goodput", {**config, "cache_tokens": CACHE_TOKENS, "traces": sorted(traces)})
    asked = [
        (trace, size, name)
        for trace in (_Trace(name, path, rows, seed, arguments.hash_seed) for name, path in traces.items())
        for size in sizes
        for name in arguments.systems or _systems(trace.name, size, quick=arguments.quick)
    ]
    # Spawned, not forked, as in other benchmarks.
    processes = ProcessPoolExecutor(arguments.workers, get_context("spawn"), signal, (SIGINT, SIG_DFL))
    with processes:
        try:
            if arguments.rates:
                _measure_at(report, asked, arguments.rates, processes)
            else:
                _measure(report, asked, bounds, processes)
        except TimeoutError:
            progress(f"{LIMIT_S:.0f} s are over: what is there by now follows")
        except (KeyboardInterrupt, BrokenProcessPool):
            progress("interrupted, or a process was ended: what is there by now follows")
        finally:
            processes.shutdown(cancel_futures=True)
    _ratios(report, list(traces), sizes)
    if not (arguments.systems or arguments.rates) and bounds == BOUNDS:
        _aims(report, list(traces), sizes, quick=arguments.quick)
    report.emit()


def _rate(text: str) -> float:
    """Parses a rate in an option, in requests per second."""
    rate = float(text)
    if not 0 < rate <= RATE_MAX:
        raise argparse.ArgumentTypeError(f"not above 0 and at most {RATE_MAX:g}: {text!r}")
    return rate


def _hashed(policy: str, seed: int) -> str:
    """Returns the policy with another seed of its pairs, if it has any."""
    name, colon, options = policy.partition(":")
    if not seed or name not in HASHING:
        return policy
    return f"{name}:{options}{',' if colon else ''}seed={seed}"


def _systems(trace: str, size: int, *, quick: bool) -> dict[str, System]:
    """Returns the systems, on eight instances with the parts (conversation) or with ``IN_TURN`` (other traces)."""
    if quick:
        return {**{name: SYSTEMS[name] for name in (LITERAL, TEXT, PREBLE, OWN)}, IN_TURN: PARTS[IN_TURN]}
    if size != 8:
        return SYSTEMS
    return {**SYSTEMS, **(PARTS if trace == "conversation" else {IN_TURN: PARTS[IN_TURN]})}


def _measure(
    report: Report, asked: Sequence[tuple[_Trace, int, str]], bounds: Bounds, processes: ProcessPoolExecutor
) -> None:
    """Measures goodputs, and reports each as soon as it is there. Raises :class:`TimeoutError`."""
    said, left_s = _saying(report)
    rates: dict[tuple[_Trace, int, str], float] = {}
    found = [processes.submit(_goodput, trace, size, SYSTEMS_ALL[name], bounds) for trace, size, name in asked]
    for (trace, size, name), future in zip(asked, found, strict=True):
        figures = future.result(left_s())
        said(f"{trace.name}, {size} instances, {name}", figures)
        if "requests_s" in figures:
            rates[trace, size, name] = figures["requests_s"]
    further = {
        trace.name: processes.submit(_further, trace, rates[trace, 8, OWN], rates[trace, 8, IN_TURN])
        for trace in dict.fromkeys(trace for trace, _, _ in asked)
        if (trace, 8, OWN) in rates and (trace, 8, IN_TURN) in rates
    }
    for name, seen in further.items():
        said(f"{name}, further", seen.result(left_s()))


def _measure_at(
    report: Report, asked: Sequence[tuple[_Trace, int, str]], rates: Sequence[float], processes: ProcessPoolExecutor
) -> None:
    """Measures the systems at these rates, as :func:`_measure` does."""
    said, left_s = _saying(report)
    points = [(*each, rate) for each in asked for rate in rates]
    found = [processes.submit(_served, trace, size, SYSTEMS_ALL[name], rate) for trace, size, name, rate in points]
    for (trace, size, name, rate), future in zip(points, found, strict=True):
        said(f"{trace.name}, {size} instances, {name}, at {rate:g} requests/s", future.result(left_s()))


def _saying(report: Report) -> tuple[Callable[[str, dict[str, Any]], None], Callable[[], float]]:
    """Returns a function that reports a result, and one that returns the seconds left."""
    started_s = monotonic()

    def left_s() -> float:
        return max(0.0, started_s + LIMIT_S - monotonic())

    def said(name: str, figures: dict[str, Any]) -> None:
        report.results[name] = figures
        progress(f"{monotonic() - started_s:.0f} s: {name}: {figures}")

    return said, left_s


def _traces(folder: Path) -> dict[str, Path | None]:
    """Returns the traces that are there; None stands for a generated one."""
    found: dict[str, Path | None] = {}
    for name in ("conversation", "synthetic"):
        path = folder / f"mooncake_{name}.jsonl.gz"
        if path.is_file():
            found[name] = path
        else:
            progress(f"{name} is left out: no {path} (--traces)")
    return {**found, "toolagent": None}


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


def _goodput(trace: _Trace, size: int, system: System, bounds: Bounds) -> dict[str, float]:
    arrivals, block_tokens = trace.arrivals()
    model = trace.model(system, size, block_tokens)
    start = STARTS[trace.name] * size

    def served_at(rate: float) -> dict[str, float]:
        return model.report(model.run(at_rate(arrivals, rate), lambda _: None), LIMITS)

    try:
        return _figures(*goodput(served_at, bounds.hold, start, step=STEP, least=LEAST * start))
    except InvalidArgument:
        return {"none_from_requests_s": round(LEAST * start, 3)}


def _served(trace: _Trace, size: int, system: System, rate: float) -> dict[str, float]:
    arrivals, block_tokens = trace.arrivals()
    model = trace.model(system, size, block_tokens)
    return _figures(rate, model.report(model.run(at_rate(arrivals, rate), lambda _: None), LIMITS))


def _further(trace: _Trace, served: float, in_turn: float) -> dict[str, Any]:
    """Measures eight instances: at eight requests a second, past saturation, and the longest prompts by order of
    service. ``served`` is pinyon's goodput, ``in_turn`` that without the order of service."""
    arrivals, block_tokens = trace.arrivals()

    def at(system: System, rate: float) -> dict[str, float]:
        model = trace.model(system, 8, block_tokens)
        return _figures(rate, model.report(model.run(at_rate(arrivals, rate), lambda _: None), LIMITS))

    own, fifo = SYSTEMS[OWN], PARTS[IN_TURN]
    return {
        "pinyon at 8 requests/s": at(own, 8.0),
        "dualmap, pending, at 8 requests/s": at(SYSTEMS[LITERAL], 8.0),
        "dualmap, expected, at 8 requests/s": at(SYSTEMS[TEXT], 8.0),
        "preble at 8 requests/s": at(SYSTEMS[PREBLE], 8.0),
        "in time per second by load": {
            name: [round(served * each * at(system, served * each)["attainment"], 3) for each in loads]
            for name, system, loads in (
                (OWN, own, OVERLOADS),
                (IN_TURN, fifo, OVERLOADS),
                (TEXT, SYSTEMS[TEXT], OVERLOADS[:2]),  # beyond its goodput by then, and slow
            )
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


def _ratios(report: Report, traces: Sequence[str], sizes: Sequence[int]) -> None:
    """Reports pinyon's goodput as a multiple of each other system's, where both are there."""
    for trace in traces:
        for size in sizes:
            where = f"{trace}, {size} instances"
            own = report.results.get(f"{where}, {OWN}", {}).get("requests_s")
            for name in SYSTEMS_ALL:
                other = report.results.get(f"{where}, {name}", {}).get("requests_s")
                if name != OWN and own is not None and other is not None:
                    report.baseline[f"{where}: goodput, of that of {name}"] = round(own / other, 3)


def _aims(report: Report, traces: Sequence[str], sizes: Sequence[int], *, quick: bool) -> None:
    def figures(trace: str, size: int, name: str) -> dict[str, float] | None:
        found: dict[str, float] = report.results.get(f"{trace}, {size} instances, {name}", {})
        return found if "requests_s" in found else None

    def aim(name: str, target: float, measured: float, *, at_most: bool = False) -> None:
        report.aims.append(Aim(name, target, measured, at_most))

    def ratio(name: str, target: float, own: dict[str, float] | None, other: dict[str, float] | None) -> None:
        if own is None or other is None:
            report.aims.append(Aim(name, target, None, at_most=False, reason="not measured"))
            return
        beside = (
            f"P99 {own['p99_s']:g} s, the other's {other['p99_s']:g} s; of the longest tenth in time "
            f"{100 * own['attainment_longest_tenth']:.1f} % and {100 * other['attainment_longest_tenth']:.1f} %"
        )
        report.aims.append(Aim(name, target, own["requests_s"] / other["requests_s"], at_most=False, reason=beside))

    for trace in traces:
        for size in sizes:
            readings = [figures(trace, size, name) for name in _systems(trace, size, quick=quick) if name in READINGS]
            there = [each for each in readings if each is not None]
            stronger = max(there, key=lambda each: each["requests_s"]) if len(there) == len(readings) else None
            own, where = figures(trace, size, OWN), f"{trace}, {size} instances: goodput"
            ratio(f"{where}, of the stronger reading's", 1.10, own, stronger)
            ratio(f"{where}, of the reading by the published code's bound", 1.16, own, figures(trace, size, LITERAL))
            if not quick:
                ssd = figures(trace, size, OWN_SSD)
                ratio(f"{where}, with SSDs, of the stronger reading's", 1.18, ssd, stronger)
        further = report.results.get(f"{trace}, further")
        if further is None:
            progress(f"{trace}: at other loads nothing was measured")
            continue
        if trace == "conversation":
            median = further["pinyon at 8 requests/s"]["p50_s"]
            aim(f"{trace}, 8 instances, 8 requests/s: median TTFT, s", 0.7, median, at_most=True)
        loads = further["in time per second by load"][OWN]
        aim(f"{trace}: in time per second at one and a half of the goodput, of its own", 1.0, loads[-1] / loads[0])
        for when in ("fifo's", "pinyon's"):
            tenth = further[f"longest tenth at {when} goodput"]
            behind = 100 * (tenth["fifo"] - tenth["most_in_time"])
            aim(f"{trace}: longest tenth behind FIFO at {when} goodput, points", 5.0, behind, at_most=True)


if __name__ == "__main__":
    main()
