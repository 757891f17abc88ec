"""FEATHER's server when it waits for its scheduler: use of memory and compute units (Figs. 5.10, 5.15), and a radix
tree in place of the chunked hash tree (Fig. 5.16)."""

from __future__ import annotations

from collections.abc import Mapping

from pinyon_lab.figures.figure import Given, Result, Section, figure
from pinyon_lab.papers.feather.costs import COSTS_NOTE, RADIX, waits
from pinyon_lab.papers.feather.runs import FCFS, PAPER, SERVED_NOTE, SERVER_NOTE, Load, Served, Server, label, served
from pinyon_lab.papers.feather.sweeps import FEATHER, Runs, drawn, table, told
from pinyon_lab.simulator.cluster_settings import SchedulingCost

STALLS_NOTE = (
    "In this figure the engine waits before each step for its scheduler, as long as was measured here before: "
    "for `lpm` and `dfs_weight` by tokens, with all that wait and before each step, as the paper describes it (the "
    "code that serves puts the line in order only where somebody may enter). Runs are modelled, so all that follows is."
)
NOTES = [SERVER_NOTE, SERVED_NOTE, STALLS_NOTE, COSTS_NOTE]


def _of(runs: Runs, policy: str, key: str) -> dict[str, float]:
    return {at: float(getattr(run, key)) for (at, name), run in runs.items() if name == label(policy)}


# -- Fig. 5.10

PREFIXES = (1_000, 2_000, 5_000)
READERS = (FCFS, FEATHER, "lpm", "dfs_weight")


@figure("feather-fig5.10", PAPER, "§5.3.2, Fig. 5.10", "memory read", measures=True)
def fig5_10(given: Given) -> Result:
    runs = {}
    for tokens in PREFIXES:
        costs = waits(READERS, tokens, given.tell, given.clock)
        for policy in READERS:
            run = served(Load(prefix_tokens=tokens), Server(policy, scheduling=costs[policy]), given.tell)
            runs[f"{tokens:,}", label(policy)] = run
    columns, rows = table("prefix", runs, ("tokens_s", "stalled", "reading", "read_s"))
    reading = {policy: _of(runs, policy, "reading") for policy in READERS}
    total = {policy: _of(runs, policy, "read_s") for policy in READERS}
    others = {at: max(reading[policy][at] for policy in READERS if policy != FEATHER) for at in reading[FEATHER]}
    slow = [policy for policy in READERS if policy not in (FCFS, FEATHER)]
    normalised = {policy: {at: total[policy][at] / total[FCFS][at] for at in total[policy]} for policy in READERS}
    section = Section("§5.3.2")
    claims = [
        section.says(
            "FEATHER consistently achieves the highest bandwidth utilization due to improved spatial locality",
            ", ".join(f"{at}: {reading[FEATHER][at]:.0%} against {others[at]:.0%}" for at in others),
            all(reading[FEATHER][at] >= others[at] for at in others),
            "share of the time in which memory is read, against the most of the others. The model has no faster "
            "reading by spatial locality: it has one number for both, and that lowers what is read",
        ),
        section.says(
            "more homogeneous batches also increase temporal locality, which is reflected in lower total DRAM usage",
            told(normalised[FEATHER]),
            all(each < 1 for each in normalised[FEATHER].values()),
            "of feather over fcfs: weights, and KV as the profile counts it, stand in for what is fetched",
        ),
        section.says(
            "SGLang's DFS-W and LPM exhibit lower mean DRAM utilization because of CPU scheduler stalls",
            "; ".join(f"{policy} {told(reading[policy])}, fcfs {told(reading[FCFS])}" for policy in slow),
            all(reading[policy][at] < reading[FCFS][at] for policy in slow for at in others),
            "shares of the time; agrees if lower than fcfs everywhere",
        ),
        section.says(
            "they also achieve lower normalized total DRAM usage",
            "; ".join(f"{policy} {told(normalised[policy])}" for policy in slow),
            all(each < 0.99 for policy in slow for each in normalised[policy].values()),
            "over fcfs; agrees if by 1 %. They are orders of the line only: whoever has memory is decoded",
        ),
    ]
    return Result(columns, rows, claims, NOTES, drawn("FEATHER Fig. 5.10: memory", "prefix", columns[2:], rows))


# -- Fig. 5.15

RATES = (5, 100)
COMPUTING = (FCFS, FEATHER, "sglang_fcfs", "lpm", "dfs_weight")


@figure("feather-fig5.15", PAPER, "§5.3.8, Fig. 5.15", "compute units by rate", measures=True)
def fig5_15(given: Given) -> Result:
    costs = waits(COMPUTING, Load().prefix_tokens, given.tell, given.clock)
    runs = {
        (f"{rate}/s", label(policy)): served(Load(rate=rate), Server(policy, scheduling=costs[policy]), given.tell)
        for rate in RATES
        for policy in COMPUTING
    }
    columns, rows = table("rate", runs, ("tokens_s", "batch", "stalled", "computing"))
    use = {policy: _of(runs, policy, "computing") for policy in COMPUTING}
    batch = {policy: _of(runs, policy, "batch") for policy in COMPUTING}
    low, most = f"{RATES[0]}/s", f"{RATES[-1]}/s"
    slow = ("lpm", "dfs_weight")
    section = Section("§5.3.8")
    claims = [
        section.says(
            "FEATHER shows slightly lower utilization at low request rates due to forming smaller batches",
            f"{use[FEATHER][low]:.1%}, fcfs {use[FCFS][low]:.1%} at {low}",
            use[FEATHER][low] < 0.99 * use[FCFS][low],
            "agrees if by 1 %. Nothing of tensor cores is modelled: what stands in is the time that the computed "
            "tokens would take at the rate of prompts, which follows throughput, and not how full a batch makes them",
        ),
        section.says(
            "its utilization rises to match vLLM's FCFS",
            f"{use[FEATHER][most]:.1%}, fcfs {use[FCFS][most]:.1%} at {most}",
            use[FEATHER][most] >= 0.95 * use[FCFS][most],
            "agrees if no more than 5 % below it. It is above, as throughput is",
        ),
        section.says(
            "SGLang's FCFS maintains relatively low utilization because it operates with consistently small "
            "batch sizes",
            f"{use['sglang_fcfs'][most]:.1%} with batches of {batch['sglang_fcfs'][most]:.0f}, fcfs "
            f"{use[FCFS][most]:.1%} with {batch[FCFS][most]:.0f}",
            use["sglang_fcfs"][most] < 0.9 * use[FCFS][most],
            f"at {most}; agrees if by a tenth",
        ),
        section.says(
            "This is mainly due to CPU-side stalls between GPU executions, during which the GPU stays idle, "
            "effectively reducing overall utilization",
            ", ".join(f"{each} {use[each][most]:.1%}, {_of(runs, each, 'stalled')[most]:.0%} waited" for each in slow),
            all(use[each][most] < 0.95 * use[FCFS][most] for each in slow),
            f"at {most}; agrees if by 5 % below fcfs ({use[FCFS][most]:.1%})",
        ),
    ]
    return Result(columns, rows, claims, NOTES, drawn("FEATHER Fig. 5.15: compute units", "rate", columns[2:], rows))


# -- Fig. 5.16

TREE_PREFIXES = (1_000, 5_000, 10_000)
TREES = {"chunked hash tree": FEATHER, "radix tree": RADIX}


@figure("feather-fig5.16", PAPER, "§5.4.1, Fig. 5.16", "chunked hash or radix tree", measures=True)
def fig5_16(given: Given) -> Result:
    runs: dict[tuple[str, str], Served] = {}
    for tokens in TREE_PREFIXES:
        costs: Mapping[str, SchedulingCost] = waits([*TREES.values()], tokens, given.tell, given.clock)
        for name, policy in TREES.items():
            server = Server(FEATHER, scheduling=costs[policy])
            runs[f"{tokens:,}", name] = served(Load(prefix_tokens=tokens), server, given.tell)
    columns, rows = table("prefix", runs, ("tokens_s", "tbt_ms", "stalled"))
    hashed, radix = TREES
    at = [f"{tokens:,}" for tokens in TREE_PREFIXES]
    rate = {each: runs[each, radix].tokens_s / runs[each, hashed].tokens_s for each in at}
    tbt = {each: runs[each, radix].tbt_s / runs[each, hashed].tbt_s for each in at}
    stalled = {name: {each: runs[each, name].stalled for each in at} for name in TREES}
    why = (
        "by construction the same policy in both; what differs is the wait before steps: of the radix tree for "
        "matching all that wait anew, token by token, as `lpm` does (in Table 3.1 the paper's radix tree takes 1.35 "
        "times what LPM takes), before each step. The line is long for part of a run only"
    )
    section = Section("§5.4.1")
    claims = [
        section.says(
            "Across all prefix lengths, the radix tree yields much lower throughput",
            told(rate),
            max(rate.values()) < 0.8,
            f"radix tree over chunked hash tree; agrees if by a fifth everywhere; {why}",
        ),
        section.says(
            "This appears as higher TBT, indicating GPU idle time due to scheduling delays",
            told(tbt),
            min(tbt.values()) > 1.02,
            "radix tree over chunked hash tree; agrees if by 2 % everywhere",
        ),
        section.says(
            "CHT avoids this by reducing scheduling overhead, enabling higher GPU utilization and throughput",
            f"{told(stalled[hashed], '.1%')} of the time is waited, with the radix tree {told(stalled[radix], '.1%')}",
            all(stalled[hashed][each] < stalled[radix][each] / 2 for each in at),
            "agrees if less than half of it everywhere",
        ),
    ]
    return Result(columns, rows, claims, NOTES, drawn("FEATHER Fig. 5.16: trees", "prefix", columns[2:], rows))
