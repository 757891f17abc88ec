"""FEATHER §5.2.8: beside a kernel that reads each group's prefix once, as PAT does, on another GPU (Fig. 5.8)."""

from __future__ import annotations

from collections.abc import Sequence

from pinyon.batching.feather_settings import GROUPED
from pinyon_lab.figures.figure import Basis, Result, Section, Tell, figure
from pinyon_lab.figures.workload import Workload
from pinyon_lab.papers.feather.runs import FCFS, MODEL_NOTE, PAPER, SERVED_NOTE, Load, Served, Server, served
from pinyon_lab.papers.feather.sweeps import FEATHER, drawn, table, told
from pinyon_lab.simulator.cluster_settings import SchedulingCost

A100 = "a100-llama-8b"
RATES = (5, 20, 100)
PAT, PAT_COST, BOTH = "PAT", "PAT, 29 % in its batches", "feather and PAT"
PAT_SHARE = 0.29
"""Table 3.1: of its time PAT, over vLLM's block table, forms batches."""

KERNEL_NOTE = (
    "PAT's kernel is modelled as one that reads KV that a group of the batch shares as if the whole batch shared it: "
    "what each further request pays for it is the profile's 0.4, put in, for PAT too. That it forms batches for 29 % "
    "of its time is Table 3.1's, on another GPU and put in as well."
)


@figure("feather-fig5.8", PAPER, "§5.2.8, Fig. 5.8", "beside PAT's kernel")
def fig5_8(workloads: Sequence[Workload], tell: Tell) -> Result:
    runs: dict[tuple[str, str], Served] = {}
    for rate in RATES:
        load, at = Load(rate=rate), f"{rate}/s"
        runs[at, "fcfs"] = served(load, Server(FCFS, A100), tell)
        runs[at, "feather"] = served(load, Server(FEATHER, A100), tell)
        pat = runs[at, PAT] = served(load, Server(FCFS, A100, kernel=GROUPED), tell)
        cost = SchedulingCost(PAT_SHARE / (1 - PAT_SHARE) * pat.step_s)
        runs[at, PAT_COST] = served(load, Server(FCFS, A100, kernel=GROUPED, scheduling=cost), tell)
        runs[at, BOTH] = served(load, Server(FEATHER, A100, kernel=GROUPED), tell)
    columns, rows = table("rate", runs, ("tokens_s", "batch", "tbt_ms"))

    def over(one: str, other: str) -> dict[str, float]:
        return {f"{rate}/s": runs[f"{rate}/s", one].tokens_s / runs[f"{rate}/s", other].tokens_s for rate in RATES}

    free, paid, both = over("feather", PAT), over("feather", PAT_COST), over(BOTH, "feather")
    section = Section("§5.2.8")
    claims = [
        section.says(
            "FEATHER consistently matches or outperforms PAT across all request rates",
            f"{told(paid)}; {told(free)} if PAT forms its batches in no time",
            min(paid.values()) > 0.97,
            "throughput over that of PAT, with Table 3.1's share; agrees if nowhere more than 3 % behind. A kernel "
            "that reads each group once has all that homogeneous batches have, and reads the weights once for all: "
            "without its cost on the CPU it is ahead by construction",
            basis=Basis.CONSTRUCTION,
        ),
        section.says(
            "A naive integration of FEATHER and PAT performs quite similarly to FEATHER over most regimes",
            told(both),
            sum(abs(each - 1) < 0.1 for each in both.values()) > len(both) / 2,
            "over feather; agrees if within a tenth at most of the rates",
        ),
    ]
    picture = drawn("FEATHER Fig. 5.8: PAT, A100", "rate", columns[2:], rows)
    return Result(columns, rows, claims, [MODEL_NOTE, SERVED_NOTE, KERNEL_NOTE], picture)
