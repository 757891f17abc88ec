"""FEATHER §5.3.3, Fig. 5.11: CPU time and throughput by the number of tokens in a chunk of its tree."""

from __future__ import annotations

from pinyon_lab.figures.figure import Basis, Column, Given, Result, Section, Table, figure
from pinyon_lab.figures.tree_costs import ASKED, TreeLoad, tree_costs
from pinyon_lab.papers.feather.costs import COSTS_NOTE, SEED, tokens_round
from pinyon_lab.papers.feather.runs import BLOCK, PAPER, SERVED_NOTE, SERVER_NOTE, Load, Server, served
from pinyon_lab.papers.feather.sweeps import FEATHER
from pinyon_lab.pictures import Bars
from pinyon_lab.simulator.cluster_settings import SchedulingCost

CHUNKS = (1, 16, 64)
"""The tokens of a chunk. All but 1 are our choice: the text prints no other."""
PREFIXES = (1_000, 5_000, 10_000)
OWN = 64
REQUESTS = 300
ENTER = 0.5
"""The requests that enter per decoding step, where 500 run in five batches and have 200 tokens each."""

CHUNKS_NOTE = (
    "CPU time is all that the tree does for a request, hashing its tokens included: an insertion, an addition, an end, "
    "and five searches. Throughput is that of a server that waits for it before its steps, modelled; the server's "
    "chunks are whole blocks of 16 tokens, so its batches with chunks of 1 are those with 16."
)


@figure("feather-fig5.11", PAPER, "§5.3.3, Fig. 5.11", "tokens of a chunk", measures=True)
def fig5_11(given: Given) -> Result:
    table = Table(
        Column("tokens", "prefix", ",d"),
        Column("chunk", "tokens of a chunk", "d"),
        Column("cpu_us", "CPU of the tree, µs per request", ",.0f", Basis.MEASURED),
        Column("tokens_s", "tokens/s", ",.0f", Basis.MODELLED),
    )
    cpu: dict[tuple[int, int], float] = {}
    rate: dict[tuple[int, int], float] = {}
    for tokens in PREFIXES:
        for chunk in CHUNKS:
            given.tell(f"{tokens:,} tokens, chunks of {chunk}")
            costs = tree_costs(TreeLoad(REQUESTS, tokens + OWN, OWN, chunk), SEED, 1, given.clock)
            calls = {"insert": 1, "add": 1, "finish": 1, "find": ASKED}
            cpu[tokens, chunk] = sum(count * costs[operation].mean_us for operation, count in calls.items())
            server = Server(
                FEATHER,
                chunk_blocks=max(1, chunk // BLOCK),
                scheduling=SchedulingCost(ENTER * cpu[tokens, chunk] / 1e6),
            )
            run = served(Load(prefix_tokens=tokens), server, given.tell)
            rate[tokens, chunk] = run.tokens_s
            table.add(tokens, chunk, cpu[tokens, chunk], run.tokens_s)
    given.tell("a radix tree")
    most, largest = PREFIXES[-1], CHUNKS[-1]
    radix = tokens_round("lpm", most, given.clock, by_tokens=True)
    radix_us = 1e6 * radix.median_s / (ENTER * 5)
    by_length = {tokens: [rate[tokens, chunk] for chunk in CHUNKS] for tokens in PREFIXES}
    spread = {tokens: max(rates) / min(rates) for tokens, rates in by_length.items()}
    gaps = [cpu[tokens, 1] - cpu[tokens, largest] for tokens in PREFIXES]
    section = Section("§5.3.3", Basis.MEASURED)
    claims = [
        section.says(
            "Increasing the chunk size reduces CPU overhead by enabling coarser-grained matching",
            ", ".join(f"{chunk}: {cpu[most, chunk]:,.0f} µs" for chunk in CHUNKS),
            all(cpu[tokens, 1] > cpu[tokens, CHUNKS[1]] > cpu[tokens, largest] for tokens in PREFIXES),
            f"per request, at {most:,} tokens; agrees if so at all lengths",
        ),
        section.says(
            "Overhead rises with prefix length due to more hash comparisons, while throughput declines due to higher "
            "KV cache memory pressure",
            ", ".join(f"{tokens:,}: {cpu[tokens, 1]:,.0f} µs, {rate[tokens, 1]:,.0f} tokens/s" for tokens in PREFIXES),
            all(
                cpu[most, chunk] > cpu[PREFIXES[0], chunk] and rate[most, chunk] < rate[PREFIXES[0], chunk]
                for chunk in CHUNKS
            ),
            "chunks of 1; agrees if so for all, from the shortest to the longest",
            basis=Basis.MODELLED,
        ),
        section.says(
            "At larger prefix lengths, the overhead gap between chunk size 1 and larger sizes widens substantially",
            ", ".join(f"{gap:,.0f} µs" for gap in gaps),
            gaps[-1] > 2 * gaps[0],
            f"between 1 and {largest}, by length; agrees if it doubles",
        ),
        section.says(
            "throughput remains similar across all chunk sizes",
            ", ".join(f"{tokens:,}: {each:.3f}×" for tokens, each in spread.items()),
            max(spread.values()) < 1.05,
            "most over least; agrees if within 5 %",
            basis=Basis.MODELLED,
        ),
        section.says(
            "even its radix tree-equivalent configuration (chunk size 1) achieves significantly better efficiency than "
            "a conventional radix tree",
            f"{radix_us / max(1e-9, cpu[most, 1]):.1f}× as much CPU time",
            radix_us > 1.5 * cpu[most, 1],
            "of a radix tree that matches all that wait (`lpm`), by tokens, for each request that enters; agrees if by "
            "half",
        ),
    ]
    groups = [f"{tokens:,}" for tokens in PREFIXES]
    taken, rates = (
        {f"chunk {chunk}": [found[tokens, chunk] for tokens in PREFIXES] for chunk in CHUNKS} for found in (cpu, rate)
    )
    panels = [
        Bars("the tree's work for a request", "CPU, µs", groups, taken, form=",.0f"),
        Bars("a server with that", "tokens/s", groups, rates, form=",.0f"),
    ]
    notes = [CHUNKS_NOTE, SERVER_NOTE, SERVED_NOTE, COSTS_NOTE]
    return table.result("FEATHER Fig. 5.11: chunks", panels, claims, notes)
