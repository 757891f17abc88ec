"""FEATHER beside other systems: their policies on requests that all arrive at once (§3.4, Table 3.1). A kernel that
reads each group's prefix once, as PAT's does, on another GPU (§5.2.8, Fig. 5.8)."""

from __future__ import annotations

from dataclasses import replace

from pinyon.batching.feather_settings import GROUPED
from pinyon_lab.figures.figure import Basis, Column, Given, Result, Section, Table, figure
from pinyon_lab.figures.rows import close, number
from pinyon_lab.papers.feather.runs import FCFS, MODEL_NOTE, PAPER, SERVED_NOTE, Load, Served, Server, label, served
from pinyon_lab.papers.feather.sweeps import FEATHER, SERVED, drawn, numbers, table, told
from pinyon_lab.pictures import Bars
from pinyon_lab.simulator.cluster_settings import SchedulingCost

PAT = "PAT"
TABLED = {
    label(FCFS): (Server(FCFS), "vLLM FCFS", 229.36, 0.0),
    label("dfs_weight"): (Server("dfs_weight"), "SGLANG DFS-W", 177.78, 92.15),
    label("lpm"): (Server("lpm"), "SGLANG LPM", 149.27, 46.62),
    label("bandit"): (Server("bandit"), "vLLM RadixTree", 139.33, 62.95),
    PAT: (Server(FCFS, kernel=GROUPED), "PAT (vLLM Block Table)", 316.45, 91.72),
    label("oracle"): (Server("oracle"), "vLLM User IDs", 105.43, 0.03),
}
"""The server, the paper's name, its seconds of all, and of batch formation. The paper does not say what stops a batch
of its own scheduler over a radix tree: here, the bandit does."""
OFFLINE = Load(rate=1e4, groups=5, prefix_tokens=10_000, output_tokens=50)
"""The load of §3.4: 2,000 requests in 229.36 s at 436.25 tokens/s have 50 tokens each. How many prefixes is not
printed."""
OFFLINE_REQUESTS = 1_000
"""Half of the paper's: lpm and dfs_weight look at all that wait, which takes long. Compare ratios, not seconds."""


@figure("feather-table3.1", PAPER, "§3.4, Table 3.1", "policies of other systems")
def table3_1(given: Given) -> Result:
    load = replace(OFFLINE, requests=OFFLINE_REQUESTS)
    found = Table(
        Column("policy", "policy"),
        Column("name", "paper's"),
        Column("paper_s", "paper, s", ".1f"),
        Column("gpu_s", "less batch time", ".1f"),
        Column("seconds", "ours, s", ".1f", Basis.MODELLED),
        *SERVED[:3],
    )
    for policy, (server, name, paper_s, scheduling_s) in TABLED.items():
        run = served(load, server, given.tell)
        shown, more = (numbers(run, part) for part in (SERVED[:3], SERVED[3:]))
        found.add(policy, name, paper_s, paper_s - scheduling_s, run.seconds, *shown.values(), **more)
    rows = found.rows
    seconds = {str(row["policy"]): number(row, "seconds") for row in rows}
    fcfs, oracle = seconds[label(FCFS)], seconds[label("oracle")]
    printed, pat = 229.36 / 105.43, 229.36 / (316.45 - 91.72)
    section = Section("§3.4, Experiment 9")
    claims = [
        section.says(
            "these policies improve performance over vLLM’s FCFS",
            f"{fcfs / seconds['dfs_weight']:.2f}×, {fcfs / seconds['lpm']:.2f}×",
            min(fcfs / seconds["dfs_weight"], fcfs / seconds["lpm"]) > 1.05,
            "five prefixes (ours) fit into memory, so the line's order decides little and steps decode all that run. "
            "CPU time of decisions is left out here, and counts in the paper's: without it, 2.68× and 2.23×",
            printed="DFS-W 1.29×, LPM 1.54×",
        ),
        section.says(
            "vLLM User IDs 105.43 0.03 (0.03%) 948.54",
            f"{fcfs / oracle:.2f}×",
            close(fcfs / oracle, printed),
            "vLLM FCFS over User IDs, execution time; agrees within a fifth. What is compared is what is left when "
            "decisions cost nothing",
            printed=f"{printed:.2f}×",
        ),
        section.says(
            "PAT (vLLM Block Table) 316.45 91.72 (29.0%) 316.63",
            f"{fcfs / seconds[PAT]:.2f}×",
            close(fcfs / seconds[PAT], pat),
            "vLLM FCFS over PAT, execution time less batch time; agrees within a fifth. A kernel that reads for each "
            "group what all of it share gains here what was put in for a whole batch; the paper's gained nothing on "
            "this GPU (§5.2.8 has it on the A100, which it is made for)",
            printed=f"{pat:.2f}×",
        ),
    ]
    bars = Bars(
        "prefixes of 10,000 tokens",
        "execution time, times that of FCFS",
        [str(row["name"]) for row in rows],
        {
            "paper": [number(row, "paper_s") / number(rows[0], "paper_s") for row in rows],
            "paper, less batch time": [number(row, "gpu_s") / number(rows[0], "gpu_s") for row in rows],
            "ours": [number(row, "seconds") / fcfs for row in rows],
        },
        form=".2f",
    )
    return found.result("FEATHER Table 3.1", [bars], claims, [MODEL_NOTE])


# -- Fig. 5.8

A100 = "a100-llama-8b"
RATES = (5, 20, 100)
PAT_COST, BOTH = "PAT, 29 % in its batches", "feather and PAT"
PAT_SHARE = 0.29
"""The share of its time in which PAT, over vLLM's block table, forms batches (Table 3.1)."""

KERNEL_NOTE = (
    "PAT's kernel is modelled as one that reads KV that a group of the batch shares as if the whole batch shared it: "
    "what each further request pays for it is the profile's 0.4, put in, for PAT too. That it forms batches for 29 % "
    "of its time is Table 3.1's, on another GPU and put in as well."
)


@figure("feather-fig5.8", PAPER, "§5.2.8, Fig. 5.8", "beside PAT's kernel")
def fig5_8(given: Given) -> Result:
    runs: dict[tuple[str, str], Served] = {}
    for rate in RATES:
        load, at = Load(rate=rate), f"{rate}/s"
        runs[at, "fcfs"] = served(load, Server(FCFS, A100), given.tell)
        runs[at, "feather"] = served(load, Server(FEATHER, A100), given.tell)
        pat = runs[at, PAT] = served(load, Server(FCFS, A100, kernel=GROUPED), given.tell)
        cost = SchedulingCost(PAT_SHARE / (1 - PAT_SHARE) * pat.step_s)
        runs[at, PAT_COST] = served(load, Server(FCFS, A100, kernel=GROUPED, scheduling=cost), given.tell)
        runs[at, BOTH] = served(load, Server(FEATHER, A100, kernel=GROUPED), given.tell)
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
