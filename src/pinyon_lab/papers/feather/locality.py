"""FEATHER §3.2: the gain in decoding by a prefix that a whole batch shares: by share of requests, share of the prompt,
number of groups, and levels of a tree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from pinyon_lab.figures.figure import Basis, Column, Given, Result, Section, Value, figure
from pinyon_lab.figures.rows import close, column, number
from pinyon_lab.papers.feather.runs import CHAPTER_3_NOTE, MAX_BATCH, PAPER, BatchRun, Parts, Server, one_batch, tree
from pinyon_lab.pictures import Bars, Picture

REQUESTS = MAX_BATCH
OUTPUT_TOKENS = 50
"""The output tokens of Experiment 1; the paper does not print those of the others."""
SUFFIX = 20
LEVEL = 0.03
"""Our choice: the difference that counts as none."""

DECODED = Column("decode_tokens_s", "decoded, tokens/s", ",.0f", Basis.MODELLED)
OVERALL = Column("tokens_s", "tokens/s", ",.0f", Basis.MODELLED)
BATCH = Column("batch", "batch", ".0f", Basis.MODELLED)
KV = Column("kv_tokens", "KV read per step, tokens", ",.0f", Basis.MODELLED)
EVICTED = Column("evicted", "evicted blocks", ",d", Basis.MODELLED)


def row(run: BatchRun, **what: Value) -> dict[str, Value]:
    return {**what, **run._asdict()}


def decoded(title: str, groups: Sequence[str], values: Mapping[str, Sequence[float]]) -> Bars:
    return Bars(title, "decoded, tokens/s", groups, values, form=",.0f")


# -- Experiment 1

SHARES = (0.0, 0.002, 0.1, 0.25, 0.5, 0.75, 0.9, 0.998, 1.0)
PREFIX = 10_000


def _two(share: float) -> list[Parts]:
    first = round(REQUESTS * share)
    return [[("A" if place < first else "B", PREFIX), (f"own {place}", SUFFIX)] for place in range(REQUESTS)]


@figure("feather-fig3.2", PAPER, "§3.2, Fig. 3.2", "two prefixes in a batch")
def fig3_2(given: Given) -> Result:
    rows = []
    for share in SHARES:
        given.tell(f"{share:.1%} on prefix A")
        rows.append(row(one_batch(_two(share), OUTPUT_TOKENS, Server()), share=share))
    columns = [Column("share", "on prefix A", ".1%"), DECODED, KV, BATCH]
    rates = column(rows, "decode_tokens_s")
    same, mixed = (rates[0], rates[-1]), rates[1:-1]
    drop = min(same) / rates[1]
    read = number(rows[1], "kv_tokens") / number(rows[0], "kv_tokens")
    section = Section("§3.2, Experiment 1", Basis.CONSTRUCTION)
    claims = [
        section.says(
            "even a single request from the other prefix group (e.g., $f = 0.002$ ) causes throughput to drop by "
            "nearly $2\\times$",
            f"{drop:.2f}×",
            close(drop, 2.0),
            "the gain was put in, between what Experiments 1 and 2 print; that one request takes all of it is the "
            "formula's; agrees within a fifth",
            printed="nearly 2×",
        ),
        section.says(
            "the throughput is highest for fully homogeneous batches",
            f"{min(same):,.0f} against at most {max(mixed):,.0f} tokens/s",
            min(same) > max(mixed),
            "Takeaway 1",
        ),
        section.says(
            "greater temporal locality in prefix-homogeneous batches reduces the total data fetched from DRAM",
            f"{read:.2f} times as much is read per step at f = 0.002",
            read > 1,
            "tokens whose KV a step reads stand in for DRAM activity. Of the paper's two effects, higher bandwidth "
            "(over 40 %) and less data, the model has one number for both, so its 40 % cannot be compared",
        ),
    ]
    title = "500 requests on two prefixes of 10,000 tokens"
    bars = decoded(title, [f"{share:g}" for share in SHARES], {"tokens/s": rates})
    return Result(columns, rows, claims, [CHAPTER_3_NOTE], Picture("FEATHER Fig. 3.2: two prefixes", [bars]))


# -- Experiment 2

FRACTIONS = tuple(tenth / 10 for tenth in range(11))
HUNDRED, LENGTH = 100, 2_000


def _partly(fraction: float) -> list[Parts]:
    shared = round(LENGTH * fraction)
    return [
        [part for part in (("shared", shared), (f"own {place}", LENGTH - shared)) if part[1]]
        for place in range(HUNDRED)
    ]


@figure("feather-fig3.4", PAPER, "§3.2, Fig. 3.4", "how much of the prompt is shared")
def fig3_4(given: Given) -> Result:
    rows = []
    for fraction in FRACTIONS:
        given.tell(f"{fraction:.0%} shared")
        rows.append(row(one_batch(_partly(fraction), OUTPUT_TOKENS, Server()), fraction=fraction))
    columns = [Column("fraction", "shared", ".0%"), DECODED, KV, EVICTED]
    rates = column(rows, "decode_tokens_s")
    gain = rates[-1] / rates[0] - 1
    steps = [after / before - 1 for before, after in pairwise(rates)]
    section = Section("§3.2, Experiment 2")
    claims = [
        section.says(
            "reaching over 60% higher throughput at $f = 1$",
            f"{gain:.0%}",
            gain > 0.6,
            "the gain was put in, between what Experiments 1 and 2 print: one share for all lengths does not have both",
            printed="over 60%",
            basis=Basis.CONSTRUCTION,
        ),
        section.says(
            "throughput increases smoothly with $f$",
            f"by {min(steps):.1%} to {max(steps):.1%} with each tenth",
            min(steps) > 0 and max(steps) < 0.15,
            "Takeaway 2; agrees if no tenth brings less than the one before it or more than 15 %",
        ),
        section.says(
            "The KV caches fit into GPU memory for all values of $f$",
            f"{max(number(each, 'evicted') for each in rows):,.0f} blocks evicted",
            not any(number(each, "evicted") for each in rows),
            "219,922 tokens",
        ),
    ]
    names = [f"{fraction:g}" for fraction in FRACTIONS]
    bars = decoded("100 requests of 2,000 tokens", names, {"tokens/s": rates})
    return Result(columns, rows, claims, [CHAPTER_3_NOTE], Picture("FEATHER Fig. 3.4: fraction shared", [bars]))


# -- Experiment 3

GROUPS = (1, 2, 5, 10, 20, 50, 100)


def grouped(count: int, groups: int, prefix: int) -> list[Parts]:
    return [[(f"prefix {place % groups}", prefix), (f"own {place}", SUFFIX)] for place in range(count)]


@figure("feather-fig3.5", PAPER, "§3.2, Fig. 3.5", "number of prefix groups")
def fig3_5(given: Given) -> Result:
    rows = []
    for groups in GROUPS:
        given.tell(f"{groups} prefixes")
        rows.append(row(one_batch(grouped(REQUESTS, groups, PREFIX), OUTPUT_TOKENS, Server()), groups=groups))
    columns = [Column("groups", "prefixes", "d"), OVERALL, DECODED, BATCH, EVICTED]
    by = {int(number(each, "groups")): each for each in rows}
    rate = {groups: number(each, "tokens_s") for groups, each in by.items()}
    batch = {groups: number(each, "batch") for groups, each in by.items()}
    middle = [rate[groups] for groups in GROUPS if 2 <= groups <= 20]
    section = Section("§3.2, Experiment 3")
    claims = [
        section.says(
            "throughput drops from $N = 1$ to $N = 2$ due to reduced temporal and spatial locality",
            f"to {rate[2] / rate[1]:.0%}",
            rate[2] < 0.8 * rate[1],
            "as in Experiment 1; agrees if by more than a fifth",
            basis=Basis.CONSTRUCTION,
        ),
        section.says(
            "from $N = 2$ to $N = 20$ , throughput remains stable",
            f"{min(middle):,.0f} to {max(middle):,.0f} tokens/s",
            min(middle) >= 0.8 * max(middle),
            "Takeaway 3; agrees if within a fifth",
        ),
        section.says(
            "throughput drops sharply from $N = 20$ to $N = 100$ , as GPU memory can no longer hold KV caches for "
            "all active prefixes",
            f"to {rate[100] / rate[20]:.0%}; {number(by[100], 'evicted'):,.0f} blocks evicted",
            rate[100] < 0.5 * rate[20],
            "nothing was put in but the size of the memory. Prefixes come in turn here, so that each is evicted "
            "before its next request",
        ),
        section.says(
            "The impact is also visible through the reduced average batch size for $N = 50$ and $N = 100$",
            ", ".join(f"{groups}: {batch[groups]:.0f}" for groups in (10, 20, 50, 100)),
            max(batch[50], batch[100]) < 0.5 * batch[20],
            "requests of a step. At 20 prefixes of 10,000 tokens memory is nearly full already",
        ),
    ]
    names = [str(each) for each in GROUPS]
    panels = [
        Bars("500 requests on so many prefixes", "tokens/s", names, {"tokens/s": [*rate.values()]}, form=",.0f"),
        Bars("the same", "requests of a step", names, {"batch": [*batch.values()]}, form=".0f"),
    ]
    return Result(columns, rows, claims, [CHAPTER_3_NOTE], Picture("FEATHER Fig. 3.5: groups", panels))


# -- Experiment 4

LENGTHS = (500, 1_000, 2_000)
"""Our choice of L: the text has three values and prints none."""
LEVELS = (1, 2, 3, 4)


def _branched(levels: int, length: int) -> list[Parts]:
    leaves = 1 << (levels - 1)
    return [[*tree(place % leaves, levels, 4 * length), (f"own {place}", SUFFIX)] for place in range(REQUESTS)]


@figure("feather-fig3.6", PAPER, "§3.2, Fig. 3.6", "trees of one to four levels")
def fig3_6(given: Given) -> Result:
    rows, rate = [], {}
    for length in LENGTHS:
        for levels in LEVELS:
            given.tell(f"{levels} levels of a prompt of {4 * length}")
            run = one_batch(_branched(levels, length), OUTPUT_TOKENS, Server())
            rate[length, levels] = run.decode_tokens_s
            rows.append(row(run, length=length, levels=levels))
    columns = [Column("length", "L", ",d"), Column("levels", "levels", "d"), DECODED, KV]
    deeper = {length: [rate[length, levels] for levels in LEVELS[1:]] for length in LENGTHS}
    spread = [max(rates) / min(rates) - 1 for rates in deeper.values()]
    section = Section("§3.2, Experiment 4")
    claims = [
        section.says(
            "a single level of radix tree has the highest performance because of maximum locality",
            ", ".join(f"L = {length}: {rate[length, 1] / rate[length, 2]:.2f} times that of two" for length in LENGTHS),
            all(rate[length, 1] > max(rates) for length, rates in deeper.items()),
            "of each L",
        ),
        section.says(
            "radix trees with 2, 3, and 4 levels exhibit similar throughput across different values of $L$",
            f"{max(spread):.1%} apart at most",
            max(spread) <= LEVEL,
            "Takeaway 4: in the formula only what the whole batch shares counts",
            basis=Basis.CONSTRUCTION,
        ),
    ]
    values = {f"{levels} level{'s' * (levels > 1)}": [rate[length, levels] for length in LENGTHS] for levels in LEVELS}
    bars = decoded("500 requests of 4L tokens", [f"L = {length:,}" for length in LENGTHS], values)
    return Result(columns, rows, claims, [CHAPTER_3_NOTE], Picture("FEATHER Fig. 3.6: trees", [bars]))
