"""FEATHER beside other systems: their policies on requests that all arrive at once (§3.4, Table 3.1). A kernel that
reads each group's prefix once, as PAT's does, on another GPU (§5.2.8, Fig. 5.8). A server that waits for its scheduler:
use of memory and compute units (Figs. 5.10, 5.15), and a radix tree in place of the chunked hash tree (Fig. 5.16)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pinyon.batching.engine_step import GROUPED
from pinyon_lab.figures.figure import Basis, Column, FigureInputs, Result, Table, columns, figure
from pinyon_lab.figures.rows import every, near, told
from pinyon_lab.papers.feather.costs import COSTS_NOTE, RADIX, waits
from pinyon_lab.papers.feather.load import FEATHER, SERVED, Runs, Sweep, numbers, stalled
from pinyon_lab.papers.feather.runs import FCFS, NOTES, PAPER, WAIT_NOTES, FeatherLoad, FeatherServer, label, served
from pinyon_lab.pictures import Bars
from pinyon_lab.simulator.cluster_settings import SchedulingCost

PAT = "PAT"
TABLED = {
    label(FCFS): (FeatherServer(FCFS), "vLLM FCFS", 229.36, 0.0),
    label("dfs_weight"): (FeatherServer("dfs_weight"), "SGLANG DFS-W", 177.78, 92.15),
    label("lpm"): (FeatherServer("lpm"), "SGLANG LPM", 149.27, 46.62),
    label("bandit"): (FeatherServer("bandit"), "vLLM RadixTree", 139.33, 62.95),
    PAT: (FeatherServer(FCFS, kernel=GROUPED), "PAT (vLLM Block Table)", 316.45, 91.72),
    label("oracle"): (FeatherServer("oracle"), "vLLM User IDs", 105.43, 0.03),
}
"""The server, the paper's name, its seconds of all, and of batch formation. The paper does not say what stops a batch
of its own scheduler over a radix tree: here, the bandit does."""
OFFLINE = FeatherLoad(rate=1e4, groups=5, prefix_tokens=10_000, output_tokens=50)
"""The load of §3.4: 2,000 requests in 229.36 s at 436.25 tokens/s have 50 tokens each. How many prefixes is not
printed."""
OFFLINE_REQUESTS = 1_000
"""Half of the paper's: lpm and dfs_weight look at all that wait, which takes long. Compare ratios, not seconds."""


@figure("feather-table3.1", PAPER, "§3.4, Table 3.1", "policies of other systems")
def table3_1(given: FigureInputs) -> Result:
    load = replace(OFFLINE, requests=OFFLINE_REQUESTS)
    found = Table(
        given,
        *columns(policy="policy", name="paper's", paper_s=("paper, s", ".1f"), gpu_s=("less batch time", ".1f")),
        Column("seconds", "ours, s", ".1f", Basis.MODELLED),
        *SERVED[:3],
        section="§3.4, Experiment 9",
    )
    for policy, (server, name, paper_s, scheduling_s) in TABLED.items():
        run = served(load, server, given.tell)
        shown, more = (numbers(run, part) for part in (SERVED[:3], SERVED[3:]))
        found.add(policy, name, paper_s, paper_s - scheduling_s, run.seconds, *shown.values(), **more)
    rows = found.rows
    seconds = rows.by("policy", "seconds")
    fcfs, oracle = seconds[label(FCFS)], seconds[label("oracle")]
    printed, pat = 229.36 / 105.43, 229.36 / (316.45 - 91.72)
    found.says(
        "these policies improve performance over vLLM’s FCFS",
        f"{fcfs / seconds['dfs_weight']:.2f}×, {fcfs / seconds['lpm']:.2f}×",
        min(fcfs / seconds["dfs_weight"], fcfs / seconds["lpm"]) > 1.05,
        "five prefixes (ours) fit into memory, so the line's order decides little and steps decode all that run. "
        "CPU time of decisions is left out here, and counts in the paper's: without it, 2.68× and 2.23×",
        printed="DFS-W 1.29×, LPM 1.54×",
    )
    found.finds(
        "vLLM User IDs 105.43 0.03 (0.03%) 948.54",
        near(fcfs / oracle, printed),
        "vLLM FCFS over User IDs, execution time; agrees within a fifth. What is compared is what is left when "
        "decisions cost nothing",
    )
    found.finds(
        "PAT (vLLM Block Table) 316.45 91.72 (29.0%) 316.63",
        near(fcfs / seconds[PAT], pat),
        "vLLM FCFS over PAT, execution time less batch time; agrees within a fifth. A kernel that reads for each "
        "group what all of it share gains here what was put in for a whole batch; the paper's gained nothing on "
        "this GPU (§5.2.8 has it on the A100, which it is made for)",
    )
    bars = Bars(
        "prefixes of 10,000 tokens",
        "execution time, times that of FCFS",
        [str(row["name"]) for row in rows],
        {
            "paper": [row["paper_s"] / rows[0]["paper_s"] for row in rows],
            "paper, less batch time": [row["gpu_s"] / rows[0]["gpu_s"] for row in rows],
            "ours": [row["seconds"] / fcfs for row in rows],
        },
        form=".2f",
    )
    return found.result("FEATHER Table 3.1", [bars], NOTES[:1])


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
def fig5_8(given: FigureInputs) -> Result:
    runs: Runs = {}
    for rate in RATES:
        load, at = FeatherLoad(rate=rate), f"{rate}/s"
        runs[at, "fcfs"] = served(load, FeatherServer(FCFS, A100), given.tell)
        runs[at, "feather"] = served(load, FeatherServer(FEATHER, A100), given.tell)
        pat = runs[at, PAT] = served(load, FeatherServer(FCFS, A100, kernel=GROUPED), given.tell)
        cost = SchedulingCost(PAT_SHARE / (1 - PAT_SHARE) * pat.step_s)
        runs[at, PAT_COST] = served(load, FeatherServer(FCFS, A100, kernel=GROUPED, scheduling=cost), given.tell)
        runs[at, BOTH] = served(load, FeatherServer(FEATHER, A100, kernel=GROUPED), given.tell)
    table = Sweep(given, "rate", runs, stalled("tokens_s", "batch", "tbt_ms"))

    def over(one: str, other: str) -> dict[str, float]:
        return {f"{rate}/s": runs[f"{rate}/s", one].tokens_s / runs[f"{rate}/s", other].tokens_s for rate in RATES}

    free, paid, both = over("feather", PAT), over("feather", PAT_COST), over(BOTH, "feather")
    table.says(
        "FEATHER consistently matches or outperforms PAT across all request rates",
        f"{told(paid)}; {told(free)} if PAT forms its batches in no time",
        min(paid.values()) > 0.97,
        "throughput over that of PAT, with Table 3.1's share; agrees if nowhere more than 3 % behind. A kernel "
        "that reads each group once has all that homogeneous batches have, and reads the weights once for all: "
        "without its cost on the CPU it is ahead by construction",
        basis=Basis.CONSTRUCTION,
    )
    table.says(
        "A naive integration of FEATHER and PAT performs quite similarly to FEATHER over most regimes",
        told(both),
        sum(abs(each - 1) < 0.1 for each in both.values()) > len(both) / 2,
        "over feather; agrees if within a tenth at most of the rates",
    )
    return table.drawn("FEATHER Fig. 5.8: PAT, A100", [*NOTES, KERNEL_NOTE])


STALLS_NOTE = (
    "In this figure the engine waits before each step for its scheduler, as long as was measured here before: "
    "for `lpm` and `dfs_weight` by tokens, with all that wait and before each step, as the paper describes it (the "
    "code that serves puts the line in order only where somebody may enter). Runs are modelled, so all that follows is."
)
STALLED_NOTES = [*WAIT_NOTES, STALLS_NOTE, COSTS_NOTE]


def _of(runs: Runs, policy: str, key: str) -> dict[str, float]:
    return {at: float(getattr(run, key)) for (at, name), run in runs.items() if name == label(policy)}


PREFIXES = (1_000, 2_000, 5_000)
READERS = (FCFS, FEATHER, "lpm", "dfs_weight")


@figure("feather-fig5.10", PAPER, "§5.3.2, Fig. 5.10", "memory read", measures=True)
def fig5_10(given: FigureInputs) -> Result:
    runs = {}
    for tokens in PREFIXES:
        costs = waits(READERS, tokens, given.tell, given.clock)
        for policy in READERS:
            run = served(FeatherLoad(prefix_tokens=tokens), FeatherServer(policy, scheduling=costs[policy]), given.tell)
            runs[f"{tokens:,}", label(policy)] = run
    table = Sweep(given, "prefix", runs, stalled("tokens_s", "stalled", "reading", "read_s"))
    reading = {policy: _of(runs, policy, "reading") for policy in READERS}
    total = {policy: _of(runs, policy, "read_s") for policy in READERS}
    others = {at: max(reading[policy][at] for policy in READERS if policy != FEATHER) for at in reading[FEATHER]}
    slow = [policy for policy in READERS if policy not in (FCFS, FEATHER)]
    normalised = {policy: {at: total[policy][at] / total[FCFS][at] for at in total[policy]} for policy in READERS}
    table.says(
        "FEATHER consistently achieves the highest bandwidth utilization due to improved spatial locality",
        ", ".join(f"{at}: {reading[FEATHER][at]:.0%} against {others[at]:.0%}" for at in others),
        all(reading[FEATHER][at] >= others[at] for at in others),
        "share of the time in which memory is read, against the most of the others. The model has no faster "
        "reading by spatial locality: it has one number for both, and that lowers what is read",
    )
    table.finds(
        "more homogeneous batches also increase temporal locality, which is reflected in lower total DRAM usage",
        every(normalised[FEATHER], lambda ratio: ratio < 1),
        "of feather over fcfs: weights, and KV as the profile counts it, stand in for what is fetched",
    )
    table.says(
        "SGLang's DFS-W and LPM exhibit lower mean DRAM utilization because of CPU scheduler stalls",
        "; ".join(f"{policy} {told(reading[policy])}, fcfs {told(reading[FCFS])}" for policy in slow),
        all(reading[policy][at] < reading[FCFS][at] for policy in slow for at in others),
        "shares of the time; agrees if lower than fcfs everywhere",
    )
    table.says(
        "they also achieve lower normalized total DRAM usage",
        "; ".join(f"{policy} {told(normalised[policy])}" for policy in slow),
        all(each < 0.99 for policy in slow for each in normalised[policy].values()),
        "over fcfs; agrees if by 1 %. They are orders of the line only: whoever has memory is decoded",
    )
    return table.drawn("FEATHER Fig. 5.10: memory", STALLED_NOTES)


STALLED_RATES = (5, 100)
COMPUTING = (FCFS, FEATHER, "sglang_fcfs", "lpm", "dfs_weight")


@figure("feather-fig5.15", PAPER, "§5.3.8, Fig. 5.15", "compute units by rate", measures=True)
def fig5_15(given: FigureInputs) -> Result:
    costs = waits(COMPUTING, FeatherLoad().prefix_tokens, given.tell, given.clock)
    runs = {
        (f"{rate}/s", label(policy)): served(
            FeatherLoad(rate=rate), FeatherServer(policy, scheduling=costs[policy]), given.tell
        )
        for rate in STALLED_RATES
        for policy in COMPUTING
    }
    table = Sweep(given, "rate", runs, stalled("tokens_s", "batch", "stalled", "computing"))
    use = {policy: _of(runs, policy, "computing") for policy in COMPUTING}
    batch = {policy: _of(runs, policy, "batch") for policy in COMPUTING}
    low, most = f"{STALLED_RATES[0]}/s", f"{STALLED_RATES[-1]}/s"
    slow = ("lpm", "dfs_weight")
    table.says(
        "FEATHER shows slightly lower utilization at low request rates due to forming smaller batches",
        f"{use[FEATHER][low]:.1%}, fcfs {use[FCFS][low]:.1%} at {low}",
        use[FEATHER][low] < 0.99 * use[FCFS][low],
        "agrees if by 1 %. Nothing of tensor cores is modelled: what stands in is the time that the computed "
        "tokens would take at the rate of prompts, which follows throughput, and not how full a batch makes them",
    )
    table.says(
        "its utilization rises to match vLLM's FCFS",
        f"{use[FEATHER][most]:.1%}, fcfs {use[FCFS][most]:.1%} at {most}",
        use[FEATHER][most] >= 0.95 * use[FCFS][most],
        "agrees if no more than 5 % below it. It is above, as throughput is",
    )
    table.says(
        "SGLang's FCFS maintains relatively low utilization because it operates with consistently small batch sizes",
        f"{use['sglang_fcfs'][most]:.1%} with batches of {batch['sglang_fcfs'][most]:.0f}, fcfs "
        f"{use[FCFS][most]:.1%} with {batch[FCFS][most]:.0f}",
        use["sglang_fcfs"][most] < 0.9 * use[FCFS][most],
        f"at {most}; agrees if by a tenth",
    )
    table.says(
        "This is mainly due to CPU-side stalls between GPU executions, during which the GPU stays idle, "
        "effectively reducing overall utilization",
        ", ".join(f"{each} {use[each][most]:.1%}, {_of(runs, each, 'stalled')[most]:.0%} waited" for each in slow),
        all(use[each][most] < 0.95 * use[FCFS][most] for each in slow),
        f"at {most}; agrees if by 5 % below fcfs ({use[FCFS][most]:.1%})",
    )
    return table.drawn("FEATHER Fig. 5.15: compute units", STALLED_NOTES)


TREE_PREFIXES = (1_000, 5_000, 10_000)
TREES = {"chunked hash tree": FEATHER, "radix tree": RADIX}


@figure("feather-fig5.16", PAPER, "§5.4.1, Fig. 5.16", "chunked hash or radix tree", measures=True)
def fig5_16(given: FigureInputs) -> Result:
    runs: Runs = {}
    for tokens in TREE_PREFIXES:
        costs: Mapping[str, SchedulingCost] = waits([*TREES.values()], tokens, given.tell, given.clock)
        for name, policy in TREES.items():
            server = FeatherServer(FEATHER, scheduling=costs[policy])
            runs[f"{tokens:,}", name] = served(FeatherLoad(prefix_tokens=tokens), server, given.tell)
    table = Sweep(given, "prefix", runs, stalled("tokens_s", "tbt_ms", "stalled"))
    hashed, radix = TREES
    at = [f"{tokens:,}" for tokens in TREE_PREFIXES]
    rate = {each: runs[each, radix].tokens_s / runs[each, hashed].tokens_s for each in at}
    tbt = {each: runs[each, radix].tbt_s / runs[each, hashed].tbt_s for each in at}
    waited = {name: {each: runs[each, name].stalled for each in at} for name in TREES}
    why = (
        "by construction the same policy in both; what differs is the wait before steps: of the radix tree for "
        "matching all that wait anew, token by token, as `lpm` does (in Table 3.1 the paper's radix tree takes 1.35 "
        "times what LPM takes), before each step. The line is long for part of a run only"
    )
    table.finds(
        "Across all prefix lengths, the radix tree yields much lower throughput",
        every(rate, lambda ratio: ratio < 0.8),
        f"radix tree over chunked hash tree; agrees if by a fifth everywhere; {why}",
    )
    table.finds(
        "This appears as higher TBT, indicating GPU idle time due to scheduling delays",
        every(tbt, lambda ratio: ratio > 1.02),
        "radix tree over chunked hash tree; agrees if by 2 % everywhere",
    )
    table.says(
        "CHT avoids this by reducing scheduling overhead, enabling higher GPU utilization and throughput",
        f"{told(waited[hashed], '.1%')} of the time is waited, with the radix tree {told(waited[radix], '.1%')}",
        all(waited[hashed][each] < waited[radix][each] / 2 for each in at),
        "agrees if less than half of it everywhere",
    )
    return table.drawn("FEATHER Fig. 5.16: trees", STALLED_NOTES)
