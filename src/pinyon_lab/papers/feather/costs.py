"""FEATHER's scheduling on the CPU, and how long a simulated server waits for it.

The costs are given by policy and length (Fig. 5.9), by operation of the tree (Table 5.1), and by tokens per chunk of
the tree (Fig. 5.11)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product

from pinyon.profiles.engine_profile import load_profile
from pinyon_lab.figures.figure import Basis, Clock, Column, FigureInputs, Result, Table, Tell, columns, figure
from pinyon_lab.figures.round_costs import CHOICES, PER_TOKEN, RoundCosts, RoundLoad, round_costs
from pinyon_lab.figures.rows import bars, courses
from pinyon_lab.figures.tree_costs import ASKED, PRINTED_US, TreeLoad, tree_costs
from pinyon_lab.papers.feather.load import FEATHER
from pinyon_lab.papers.feather.runs import BLOCK, FCFS, MACHINE, PAPER, WAIT_NOTES, FeatherLoad, FeatherServer, served
from pinyon_lab.pictures import Bars, Courses
from pinyon_lab.simulator.cluster_settings import SchedulingCost

COSTS_NOTE = (
    "Measured: CPU time of this code in this process, on the machine at hand; the paper's is of another one and, of "
    "its tree, in C++. SGLang's trees are of tokens: so are those that a server here waits for. "
    "`./dev bench batching` measures the same for longer, and compiled."
)
SEED = 1
ROUNDS = 6
REQUESTS = 500
"""The number of requests that run; as many wait."""
LENGTHS = (1_000, 5_000, 10_000, 20_000)
BY_TOKENS = ", by tokens"
RADIX = "radix"
"""A stand-in for a policy: ``feather`` with a radix tree, which matches all waiting requests as ``lpm`` does."""


def tokens_round(name: str, tokens: int, clock: Clock, *, by_tokens: bool = False) -> RoundCosts:
    load = RoundLoad(tokens, REQUESTS, **({"key_tokens": 1} if by_tokens else {}))
    return round_costs(CHOICES[name], load, load_profile(MACHINE), SEED, ROUNDS, clock)


def waits(policies: Sequence[str], tokens: int, tell: Tell, clock: Clock) -> dict[str, SchedulingCost]:
    """Returns the measured cost of each policy before each step. Policies that order the queue also take time for each
    waiting request. As in the paper, they order it before each step; our serving code does so only when a request may
    enter."""
    found = {}
    for policy in policies:
        tell(f"scheduling of {policy}, {tokens:,} tokens")
        if policy in PER_TOKEN or policy == RADIX:
            name = policy if policy in PER_TOKEN else PER_TOKEN[0]
            waiting_s = tokens_round(name, tokens, clock, by_tokens=True).median_s / REQUESTS
            own = tokens_round("feather" if policy == RADIX else FCFS, tokens, clock)
            found[policy] = SchedulingCost(own.median_s / own.steps, waiting_s)
        else:
            own = tokens_round(FCFS if policy.endswith(FCFS) else "feather", tokens, clock)
            found[policy] = SchedulingCost(own.median_s / own.steps)
    return found


@figure("feather-fig5.9", PAPER, "§5.3.1, Fig. 5.9", "CPU time of policies", measures=True)
def fig5_9(given: FigureInputs) -> Result:
    table = Table(
        given,
        *columns(tokens=("prefix", ",d"), policy="policy"),
        Column("cpu_ms", "CPU, ms per round", ".2f", Basis.MEASURED),
        Column("engine_ms", "engine, ms per round of oracle", ",.0f", Basis.MODELLED),
        Column("share", "of the engine's", ".2%", Basis.MODELLED),
    )
    slow = [name + BY_TOKENS for name in PER_TOKEN]
    for tokens, name in product(LENGTHS, (*CHOICES, *slow)):
        given.tell(f"{name}, {tokens:,} tokens")
        costs = tokens_round(name.removesuffix(BY_TOKENS), tokens, given.clock, by_tokens=name.endswith(BY_TOKENS))
        table.add(tokens, name, 1e3 * costs.median_s, 1e3 * costs.engine_s, costs.of_engine_time)
    ms, share = (table.rows.cells("policy", "tokens", key) for key in ("cpu_ms", "share"))
    least, most = LENGTHS[0], max(LENGTHS)
    over = {name: ms[name + BY_TOKENS, most] / ms["feather", most] for name in PER_TOKEN}
    exceed = max(share[name, most] for name in slow)
    grown = {name: ms[name, most] / ms[name, least] for name in ("feather", *slow)}
    own, oracle = ({tokens: share[name, tokens] for tokens in LENGTHS} for name in ("feather", "oracle"))
    table.says(
        "At 20K tokens, LPM and DFS-W incur roughly $1,000\\times$ higher overhead than FEATHER",
        _told(over, ",.0f", "×"),
        min(over.values()) >= 800,
        "both trees are Python's, or both compiled, here; the paper compares Python with C++. Nearly all of "
        "`feather`'s is that batches are formed anew of all that run, which is done in each round here",
        printed="1,000×",
        basis=Basis.MEASURED,
    )
    table.says(
        "their scheduling overhead exceeds the Oracle GPU execution time by up to $10\\times$",
        f"{exceed:.2f}× of it at {most:,} tokens",
        exceed > 1,
        "the engine's time is modelled; agrees if it exceeds it at all",
        printed="10×",
    )
    table.says(
        "FEATHER remains below 1% of GPU execution time across the entire range",
        ", ".join(f"{tokens:,}: {each:.2%}" for tokens, each in own.items()),
        max(own.values()) < 0.01,
        "the engine's time is modelled; compiled it is half of what Python takes",
        printed="1 %",
    )
    table.says(
        "All three realistic policies—FEATHER, LPM, and DFS-W— incurr higher overhead as the prefix length "
        "increases due to deeper radix-tree traversals and larger key comparisons. However, their growth rates "
        "diverge significantly",
        _told(grown, ".1f", "×"),
        min(grown.values()) > 1 and min(grown[name] for name in slow) > 2 * grown["feather"],
        f"at {most:,} tokens, over {least:,}; agrees if all grow, and SGLang's twice as much as feather's",
        basis=Basis.MEASURED,
    )
    table.says(
        "effectively zero scheduling cost while preserving locality",
        f"{max(oracle.values()):.3%} of the engine's time at most",
        max(oracle.values()) < 0.01,
        "of the oracle; agrees if below 1 %",
    )
    curves = [replace(each, dashed=each.label not in slow) for each in courses(share)]
    title, y_label = f"{REQUESTS} requests run, as many wait", "CPU, share of the engine's time"
    panel = Courses(title, "tokens of the prefix", y_label, curves)
    return table.result("FEATHER Fig. 5.9: CPU overhead", [panel], [COSTS_NOTE])


def _told(found: Mapping[str, float], form: str, unit: str) -> str:
    return ", ".join(f"{name} {format(each, form)}{unit}" for name, each in found.items())


TREE = TreeLoad(1_000, 5_000, 64, 50)
"""A fifth of the paper's requests. The shared part of their tokens is our choice: the text does not print it."""
NAMES = {"insert": "INSERT", "add": "ADDTOBATCH", "finish": "FINISH", "find": "FINDBEST"}
SAID = {
    "insert": "INSERT 5,000 153,714 768,570,573",
    "add": "ADDTOBATCH 5,000 11,143 55,715,469",
    "finish": "FINISH 5,000 38,952 194,760,111",
    "find": "FINDBEST 26,405 6,641 175,372,986",
}


@figure("feather-table5.1", PAPER, "§5.3.4, Table 5.1", "CPU time of the tree's operations", measures=True)
def table5_1(given: FigureInputs) -> Result:
    given.tell(f"{TREE.requests:,} requests of {TREE.tokens:,} tokens")
    costs = tree_costs(TREE, SEED, 1, given.clock)
    ours = {key: costs[key].mean_us for key in NAMES}
    total = {key: costs[key].calls * ours[key] for key in NAMES}
    table = Table(
        given,
        Column("operation", "operation"),
        Column("calls", "calls", ",d", Basis.MEASURED),
        Column("paper_ns", "paper, mean, ns", ",.0f"),
        *columns(Basis.MEASURED, mean_ns=("ours, mean, ns", ",.0f"), p99_ns=("P99, ns", ",.0f")),
        *columns(Basis.MEASURED, total_ms=("total, ms", ".1f")),
        basis=Basis.MEASURED,
    )
    for key, name in NAMES.items():
        ns = (1e3 * each for each in (PRINTED_US[key], ours[key], costs[key].p99_us))
        table.add(name, costs[key].calls, *ns, total[key] / 1e3)
    for key in NAMES:
        table.says(
            SAID[key],
            f"{1e3 * ours[key]:,.0f} ns",
            ours[key] <= PRINTED_US[key],
            "mean; agrees if it is no more than the paper's, in C++ on another machine",
            printed=f"{1e3 * PRINTED_US[key]:,.0f} ns",
            section="§5.3.4, Table 5.1",
        )
    table.says(
        "INSERT dominates total time because hash computation scans every token once",
        f"{total['insert'] / max(1e-9, sum(total.values())):.0%}",
        total["insert"] >= max(total.values()),
        "of all; the paper's share is from Table 5.1. Agrees if nothing takes more",
        printed="64 %",
    )
    table.says(
        "FINISH is more expensive than ADDTOBATCH, despite their symmetric roles",
        f"{ours['finish'] / max(1e-9, ours['add']):.2f}×",
        ours["finish"] > ours["add"],
        "means; ours keeps counts at nodes, so that nothing is searched when one ends",
        printed="3.5×",
    )
    table.says(
        "FINDBEST is the cheapest per-call operation due to result caching and lazy heap traversal",
        f"{1e3 * ours['find']:,.0f} ns",
        ours["find"] <= min(ours.values()),
        "five times for each that enters, of which four are known already",
    )
    panel = Bars(
        f"{TREE.requests:,} requests of {TREE.tokens:,} tokens",
        "mean, µs",
        list(NAMES.values()),
        {"paper": [PRINTED_US[key] for key in NAMES], "ours": [ours[key] for key in NAMES]},
        form=".1f",
    )
    return table.result("FEATHER Table 5.1: tree operations", [panel], [COSTS_NOTE])


CHUNKS = (1, 16, 64)
"""The tokens of a chunk. All but 1 are our choice: the text prints no other."""
PREFIXES = (1_000, 5_000, 10_000)
OWN = 64
CHUNK_REQUESTS = 300
ENTER = 0.5
"""The requests that enter per decoding step, where 500 run in five batches and have 200 tokens each."""

CHUNKS_NOTE = (
    "CPU time is all that the tree does for a request, hashing its tokens included: an insertion, an addition, an end, "
    "and five searches. Throughput is that of a server that waits for it before its steps, modelled; the server's "
    "chunks are whole blocks of 16 tokens, so its batches with chunks of 1 are those with 16."
)


@figure("feather-fig5.11", PAPER, "§5.3.3, Fig. 5.11", "tokens of a chunk", measures=True)
def fig5_11(given: FigureInputs) -> Result:
    table = Table(
        given,
        *columns(tokens=("prefix", ",d"), chunk=("tokens of a chunk", "d")),
        Column("cpu_us", "CPU of the tree, µs per request", ",.0f", Basis.MEASURED),
        Column("tokens_s", "tokens/s", ",.0f", Basis.MODELLED),
        basis=Basis.MEASURED,
    )
    for tokens, chunk in product(PREFIXES, CHUNKS):
        given.tell(f"{tokens:,} tokens, chunks of {chunk}")
        costs = tree_costs(TreeLoad(CHUNK_REQUESTS, tokens + OWN, OWN, chunk), SEED, 1, given.clock)
        calls = {"insert": 1, "add": 1, "finish": 1, "find": ASKED}
        cpu_us = sum(count * costs[operation].mean_us for operation, count in calls.items())
        waited = SchedulingCost(ENTER * cpu_us / 1e6)
        server = FeatherServer(FEATHER, chunk_blocks=max(1, chunk // BLOCK), scheduling=waited)
        table.add(tokens, chunk, cpu_us, served(FeatherLoad(prefix_tokens=tokens), server, given.tell).tokens_s)
    cpu, rate = (table.rows.cells("tokens", "chunk", key) for key in ("cpu_us", "tokens_s"))
    given.tell("a radix tree")
    most, largest = PREFIXES[-1], CHUNKS[-1]
    radix = tokens_round("lpm", most, given.clock, by_tokens=True)
    radix_us = 1e6 * radix.median_s / (ENTER * 5)
    by_length = {tokens: [rate[tokens, chunk] for chunk in CHUNKS] for tokens in PREFIXES}
    spread = {tokens: max(rates) / min(rates) for tokens, rates in by_length.items()}
    gaps = [cpu[tokens, 1] - cpu[tokens, largest] for tokens in PREFIXES]
    table.says(
        "Increasing the chunk size reduces CPU overhead by enabling coarser-grained matching",
        ", ".join(f"{chunk}: {cpu[most, chunk]:,.0f} µs" for chunk in CHUNKS),
        all(cpu[tokens, 1] > cpu[tokens, CHUNKS[1]] > cpu[tokens, largest] for tokens in PREFIXES),
        f"per request, at {most:,} tokens; agrees if so at all lengths",
    )
    table.says(
        "Overhead rises with prefix length due to more hash comparisons, while throughput declines due to higher "
        "KV cache memory pressure",
        ", ".join(f"{tokens:,}: {cpu[tokens, 1]:,.0f} µs, {rate[tokens, 1]:,.0f} tokens/s" for tokens in PREFIXES),
        all(
            cpu[most, chunk] > cpu[PREFIXES[0], chunk] and rate[most, chunk] < rate[PREFIXES[0], chunk]
            for chunk in CHUNKS
        ),
        "chunks of 1; agrees if so for all, from the shortest to the longest",
        basis=Basis.MODELLED,
    )
    table.says(
        "At larger prefix lengths, the overhead gap between chunk size 1 and larger sizes widens substantially",
        ", ".join(f"{gap:,.0f} µs" for gap in gaps),
        gaps[-1] > 2 * gaps[0],
        f"between 1 and {largest}, by length; agrees if it doubles",
    )
    table.says(
        "throughput remains similar across all chunk sizes",
        ", ".join(f"{tokens:,}: {each:.3f}×" for tokens, each in spread.items()),
        max(spread.values()) < 1.05,
        "most over least; agrees if within 5 %",
        basis=Basis.MODELLED,
    )
    table.says(
        "even its radix tree-equivalent configuration (chunk size 1) achieves significantly better efficiency than "
        "a conventional radix tree",
        f"{radix_us / max(1e-9, cpu[most, 1]):.1f}× as much CPU time",
        radix_us > 1.5 * cpu[most, 1],
        "of a radix tree that matches all that wait (`lpm`), by tokens, for each request that enters; agrees if by "
        "half",
    )
    tokens_of, chunk_of = "{:,}".format, "chunk {}".format
    panels = [
        bars("the tree's work for a request", "CPU, µs", cpu, ",.0f", group=tokens_of, label=chunk_of),
        bars("a server with that", "tokens/s", rate, ",.0f", group=tokens_of, label=chunk_of),
    ]
    notes = [CHUNKS_NOTE, *WAIT_NOTES, COSTS_NOTE]
    return table.result("FEATHER Fig. 5.11: chunks", panels, notes)
