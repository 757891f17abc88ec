"""SkyWalker §5.1, Fig. 8: throughput and latencies of all systems, workload by workload."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from pinyon_lab.figures.figure import Column, Result, Simulated, Tell, figure
from pinyon_lab.papers.skywalker.claims import OTHERS, OURS, Runs, serving_claims
from pinyon_lab.papers.skywalker.runs import (
    COLUMNS,
    LENGTHS_NOTE,
    MODEL_NOTE,
    PAPER,
    QUICK_NOTE,
    Load,
    ran,
    row,
)
from pinyon_lab.pictures import Bars, Picture
from pinyon_lab.simulator.regions.measures import Measured

__all__ = ["LOADS", "fig8"]

ALL: Final = (*OTHERS, *OURS, "pinyon")
UNBALANCED: Final = (("us", 3), ("eu", 2), ("asia", 3))
BALANCED: Final = (("us", 4), ("eu", 4), ("asia", 4))
LOADS: Final[Mapping[str, Load]] = {
    "arena": Load("arena", UNBALANCED, (("us", 80), ("eu", 80), ("asia", 80))),
    "wildchat": Load("wildchat", UNBALANCED, (("us", 40), ("eu", 30), ("asia", 30)), 120.0, 960.0),
    "tree": Load("tree", BALANCED, (("us", 40), ("eu", 20), ("asia", 20))),
    "mixed-tree": Load("mixed-tree", BALANCED, (("us", 2), ("eu", 20), ("asia", 20))),
}
"""§5.1. Of conversations it does not say which of its replica distributions was used: here, the one that it calls
unbalanced; trees have four replicas in each region."""
LOAD_NOTE: Final = (
    "The paper keeps its replicas at high utilisation. With its numbers of clients and these lengths, requests hold "
    "the shares of KV memory that the table shows, so that few wait for room and pushing seldom decides: what sets "
    "systems apart here is what they reuse, and where their load balancers are. Fig. 10 has the load at which it does."
)


@figure("skywalker-fig8", PAPER, "§5.1, Fig. 8", "six systems and SkyWalker, four workloads")
@Simulated
def fig8(tell: Tell, quick: bool) -> Result:
    runs = {
        (name, system): ran(load.quick() if quick else load, system, tell)
        for name, load in LOADS.items()
        for system in ALL
    }
    rows = [row({"workload": name, "system": system}, found) for (name, system), found in runs.items()]
    columns = [Column("workload", "workload"), Column("system", "system"), *COLUMNS]
    notes = [MODEL_NOTE, LENGTHS_NOTE, LOAD_NOTE, *([QUICK_NOTE] if quick else [])]
    return Result(columns, rows, serving_claims(runs), notes, _picture(runs))


def _picture(runs: Runs) -> Picture:
    def bars(title: str, label: str, value: Callable[[Measured], float], form: str) -> Bars:
        values = {system: [value(runs[workload, system].measured) for workload in LOADS] for system in ALL}
        return Bars(title, label, tuple(LOADS), values, form)

    return Picture(
        "SkyWalker Fig. 8",
        [
            bars("Throughput", "thousand output tokens/s", lambda each: each.output_tokens_per_s / 1e3, ".1f"),
            bars("TTFT, mean", "seconds", lambda each: each.ttft.mean, ".1f"),
            bars("TTFT, P90", "seconds", lambda each: each.ttft.p90, ".1f"),
            bars("End to end, P50", "seconds", lambda each: each.e2e.p50, ".0f"),
        ],
    )
