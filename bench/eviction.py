"""The gain by pinyon's own eviction policy, as the share of the gap between LRU and Belady's optimum that it closes.

It is measured on generated traces and public ones that the policy was not tuned on. Other parts are the cost of a
decision, and one cache for all nodes against one for each. ``--sweep`` instead varies the parameters of generated
traces that nobody published. Tables are in Markdown, as in docs/notebook/benchmarks.md."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench import eviction_aims, eviction_sweep
from bench.eviction_cells import BELADY, LRU, OWN, Cell, Outcome, measure_all
from bench.eviction_decision import DECISION_US, decisions
from bench.eviction_traces import Generated, Public, requests_of
from bench.report import Aim, Report, number, parser, progress
from pinyon.core.errors import PinyonError
from pinyon_lab.papers import FIGURES, SOURCES

TRACES = Path(__file__).resolve().parents[2] / "shared" / "traces"
DECISION, GLOBAL = "decision", "global"
PARTS = (*eviction_aims.PARTS, DECISION, GLOBAL)
LIMIT_S = 1500.0
"""The time for all replays; those that are not done by then are left out."""
CORNERS_MAX = 100
DECISIONS = ((Generated("qwen-a", 2), 6_000, 17_000), (Generated("toolagent", 2), 6_000, 1_600))
"""The trace, the number of its first requests, and the capacity in blocks."""
OF_IDEAL_AT_30M = {"conversation": 97.9, "synthetic": 100.0}
"""The percentages by an LRU replay that is not ours."""


class Cells:
    """A measurement of cells that reports its progress."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        self._cells = cells
        self.found: dict[Cell, Outcome] = {}
        self.why_not = {
            cell: cell.trace.missing for cell in cells if isinstance(cell.trace, Public) and cell.trace.missing
        }
        self._started = time.monotonic()

    def measure(self, policies: Sequence[str], processes: int) -> None:
        for reason in sorted(set(self.why_not.values())):
            progress(f"skipped: {reason}")
        there = [cell for cell in self._cells if cell not in self.why_not]
        if there:
            measure_all(there, policies, processes, LIMIT_S, self._done)
        for cell in there:
            if cell not in self.found:
                self.why_not[cell] = f"not done within {LIMIT_S:.0f} s"

    def _done(self, cell: Cell, outcome: Outcome) -> None:
        self.found[cell] = outcome
        closed = outcome.closed_percent(OWN)
        share = "no gap" if closed is None else f"{closed:.1f} % of the gap of {outcome.gap_points:.2f} points"
        progress(
            f"{len(self.found)} of {len(self._cells) - len(self.why_not)}, {time.monotonic() - self._started:.0f} s: "
            f"{cell}: {share}"
        )


def measure_decisions(report: Report, quick: bool) -> None:
    """Measures the cost of decisions in this process, with nothing beside it."""
    policies = (LRU, "workload_aware", OWN)
    lines = [f"| CPU µs per evicted block | {' | '.join(policies)} |", f"|---|{'---:|' * len(policies)}"]
    for trace, limit, capacity in DECISIONS:
        progress(f"decisions: {trace.name}")
        requests = requests_of(trace)[: limit // 4 if quick else limit]
        name = f"{trace.name}, {len(requests):,} requests, {capacity:,} blocks"
        found = decisions(requests, capacity, policies, rounds=1 if quick else 5)
        report.results.setdefault("decision_cpu_us_per_evicted_block", {})[name] = found
        report.aims.append(Aim(f"{name}: policy's CPU per evicted block, us", DECISION_US, found[OWN]["median"]))
        cells = [f"{each['median']:.1f} ({each['min']:.1f} to {each['max']:.1f})" for each in found.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    progress("\n".join(lines))


def compare_global(report: Report, traces: Path) -> None:
    """Makes Mooncake's Figs. 9 and 10 as ``pinyon reproduce`` does: their claims, and what 30 million tokens hold."""
    sources = {name: Public(SOURCES[name].stem, traces) for name in FIGURES["mooncake-fig9"].needs}
    missing = "; ".join(source.missing for source in sources.values() if source.missing)
    if missing:
        report.aims.append(Aim("Mooncake Figs. 9 and 10: claims that hold", 1, None, at_most=False, reason=missing))
        progress(f"skipped: {missing}")
        return
    workloads = [replace(source.workload(), name=name) for name, source in sources.items()]
    for figure in (FIGURES["mooncake-fig9"], FIGURES["mooncake-fig10"]):
        made = figure.make(workloads, progress)
        report.results[figure.name] = made.as_json()["rows"]
        for row in made.rows:
            if (target := OF_IDEAL_AT_30M.get(str(row["workload"]))) and figure.name == "mooncake-fig9":
                share = round(100 * float(row["at_30m"] or 0) / float(row["ideal"] or 1), 1)
                text = f"{row['workload']}: of the ideal hit ratio, LRU with 30M tokens, %"
                report.aims.append(Aim(text, target, share, at_most=False))
        for claim in made.claims:
            printed = "not printed" if claim.printed is None else claim.printed
            text = f"{figure.name}, {claim.section}: paper {printed}, ours {claim.ours}: agrees"
            report.aims.append(Aim(text, 1, int(claim.agrees), at_most=False, reason=claim.why))


def measure_gains(arguments: argparse.Namespace, parts: Sequence[str], report: Report) -> None:
    """Measures the hit ratios of all replays."""
    of_parts = eviction_aims.wanted(arguments.traces, arguments.quick)
    wanted = [each for part in parts for each in of_parts.get(part, ())]
    if not wanted:
        return
    cells = Cells([each.cell for each in wanted])
    cells.measure((LRU, OWN, BELADY), arguments.processes)
    report.results["hits"] = eviction_aims.results(wanted, cells.found)
    report.aims += eviction_aims.aims(wanted, cells.found, cells.why_not)
    progress(eviction_aims.markdown(wanted, cells.found))


def measure_sweep(arguments: argparse.Namespace, report: Report) -> None:
    wanted = eviction_sweep.varied(arguments.corners, arguments.seed)
    cells = Cells([each.cell for each in wanted])
    cells.measure(eviction_sweep.POLICIES, arguments.processes)
    report.results["sweep"] = eviction_sweep.results(wanted, cells.found)
    report.results["left_out"] = [str(cell) for cell in cells.why_not]
    report.aims += eviction_sweep.aims(wanted, cells.found)
    progress(eviction_sweep.markdown(wanted, cells.found))


def _arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="these parts")
    options.add_argument("--traces", type=Path, default=TRACES, help="folder of the public traces")
    options.add_argument("--processes", type=number(1, 64), default=2, help="at a time (default 2)")
    options.add_argument("--sweep", action="store_true", help="the generator's free parameters instead")
    options.add_argument(
        "--corners", type=number(0, CORNERS_MAX), default=6, help="of the sweep, drawn by --seed (default 6)"
    )
    arguments = options.parse_args()
    if arguments.traces != TRACES and not arguments.traces.is_dir():
        options.error(f"no folder of traces at {arguments.traces}")
    if arguments.sweep and (arguments.quick or arguments.only != PARTS):
        options.error("--sweep goes with neither --quick nor --only")
    return arguments


def main() -> None:
    arguments = _arguments()
    started, load = time.monotonic(), os.getloadavg()[0]
    config = {"seed": arguments.seed, "quick": arguments.quick, "processes": arguments.processes}
    report = Report("eviction", {**config, "sweep": arguments.sweep, "load_before": round(load, 2)})
    try:
        if arguments.sweep:
            measure_sweep(arguments, report)
        else:
            if DECISION in arguments.only:
                measure_decisions(report, arguments.quick)
            if GLOBAL in arguments.only:
                compare_global(report, arguments.traces)
            measure_gains(arguments, arguments.only, report)
    except PinyonError as error:
        sys.exit(f"bench eviction: {error}")
    report.config["duration_s"] = round(time.monotonic() - started, 1)
    report.emit()


if __name__ == "__main__":
    main()
