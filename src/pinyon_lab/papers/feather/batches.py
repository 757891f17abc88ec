"""FEATHER §3.2 and §3.3: prefix lengths and groups with a small model, partly shared prompts, and smaller batches that
share a prefix."""

from __future__ import annotations

from pinyon_lab.figures.figure import Basis, Column, Given, Result, Section, Value, figure
from pinyon_lab.papers.feather.locality import (
    BATCH,
    DECODED,
    EVICTED,
    OUTPUT_TOKENS,
    OVERALL,
    REQUESTS,
    SUFFIX,
    decoded,
    grouped,
    row,
)
from pinyon_lab.papers.feather.runs import CHAPTER_3_NOTE, PAPER, Parts, Server, batches, one_batch
from pinyon_lab.pictures import Bars, Picture

# -- Experiment 5

SMALL_MODEL = "rtx6000ada-qwen-0.5b"
LENGTHS = (100, 500, 1_000, 5_000, 10_000)
"""Our choice, as the groups are: the text prints neither."""
GROUPS = (1, 2, 5, 20)
SHORT, DROP = 0.05, 0.2
"""Our choice: the greatest loss that is no drop, and the least that is one."""


@figure("feather-fig3.8", PAPER, "§3.2, Fig. 3.8", "prefix lengths and groups, Qwen 0.5B")
def fig3_8(given: Given) -> Result:
    rows: list[dict[str, Value]] = []
    rate: dict[tuple[int, int], float] = {}
    for length in LENGTHS:
        for groups in GROUPS:
            given.tell(f"{groups} prefixes of {length} tokens")
            run = one_batch(grouped(REQUESTS, groups, length), OUTPUT_TOKENS, Server(machine=SMALL_MODEL))
            rate[length, groups] = run.decode_tokens_s
            rows.append(row(run, length=length, groups=groups, mb=12_288 * length * groups / 1e6))
    columns = [
        Column("length", "prefix", ",d"),
        Column("groups", "prefixes", "d"),
        Column("mb", "their KV, MB", ",.0f"),
        DECODED,
    ]
    drops = {length: 1 - rate[length, 2] / rate[length, 1] for length in LENGTHS}
    told = ", ".join(f"{length:,}: {drop:.0%}" for length, drop in drops.items())
    after = max(abs(rate[length, groups] / rate[length, 2] - 1) for length in LENGTHS for groups in GROUPS[1:])
    by_groups = ([rate[length, groups] for length in LENGTHS] for groups in GROUPS)
    fell = all(rates == sorted(rates, reverse=True) for rates in by_groups)
    section = Section("§3.2, Experiment 5")
    claims = [
        section.says(
            "this drop from 1 to 2 prefix groups is observable only for larger shared prefix lengths",
            told,
            drops[LENGTHS[0]] < SHORT and drops[LENGTHS[-1]] > DROP,
            "the formula gives that by itself: what a short prefix saves is little beside weights and 50 µs a "
            "request. Agrees if the shortest loses less than 5 % and the longest more than 20 %",
        ),
        section.says(
            "Beyond this point, however, throughput remains relatively stable",
            f"{after:.1%} from that of two prefixes at most",
            after <= SHORT,
            "only what all share counts",
            basis=Basis.CONSTRUCTION,
        ),
        section.says(
            "throughput decreases as the prefix sequence length increases",
            "at every number of groups" if fell else "not everywhere",
            fell,
        ),
        section.says(
            "no clear throughput degradation is observed once this threshold is exceeded",
            "no threshold at 96 MB",
            True,
            "Takeaway 5: the formula knows no size of a cache",
            basis=Basis.CONSTRUCTION,
        ),
    ]
    values = {
        f"{groups} prefix{'es' * (groups > 1)}": [rate[length, groups] for length in LENGTHS] for groups in GROUPS
    }
    bars = decoded("500 requests, Qwen 0.5B", [f"{length:,}" for length in LENGTHS], values)
    return Result(columns, rows, claims, [CHAPTER_3_NOTE], Picture("FEATHER Fig. 3.8: lengths and groups", [bars]))


# -- Experiment 6

FIRSTS = (0.0, 0.4, 0.8, 0.9, 1.0)
SECONDS = (0.0, 0.5, 0.8, 1.0)
LENGTH, SUFFIXES = 10_000, 50


def _mixed(first: float, second: float) -> list[Parts]:
    shared, same = round(LENGTH * first), round(REQUESTS * second)
    prompts: list[Parts] = []
    for place in range(REQUESTS):
        suffix = "A" if place * same // REQUESTS < (place + 1) * same // REQUESTS else f"B{place % SUFFIXES}"
        prompts.append([part for part in (("shared", shared), (suffix, LENGTH - shared)) if part[1]])
    return prompts


@figure("feather-fig3.9", PAPER, "§3.2, Fig. 3.9", "partly shared prompts")
def fig3_9(given: Given) -> Result:
    rows: list[dict[str, Value]] = []
    rate: dict[tuple[float, float], float] = {}
    for first in FIRSTS:
        for second in SECONDS:
            given.tell(f"{first:.0%} shared by all, {second:.0%} with suffix A")
            run = one_batch(_mixed(first, second), OUTPUT_TOKENS, Server())
            rate[first, second] = run.tokens_s
            rows.append(row(run, first=first, second=second))
    columns = [Column("first", "f1", ".0%"), Column("second", "f2", ".0%"), OVERALL, BATCH, EVICTED]
    jump = {first: rate[first, 1.0] / rate[first, 0.8] for first in FIRSTS if first < 1}
    flat = [rate[0.8, second] for second in SECONDS if second < 1]
    section = Section("§3.2, Experiment 6")
    claims = [
        section.says(
            "we observe a sharp increase in throughput when $f_2$ changes from 0.8 to 1",
            ", ".join(f"f1 {first:g}: {each:.2f}×" for first, each in jump.items()),
            min(jump.values()) > 1.1,
            "Takeaway 6; agrees if by a tenth at every f1 below 1",
        ),
        section.says(
            "increasing $f_1$ improves throughput due to enhanced temporal and spatial locality",
            ", ".join(f"{first:g}: {rate[first, 0.5]:,.0f}" for first in FIRSTS),
            [rate[first, 0.5] for first in FIRSTS] == sorted(rate[first, 0.5] for first in FIRSTS),
            "tokens/s at f2 = 0.5",
        ),
        section.says(
            "once the working set fits within GPU memory (around $f_1 = 0.8$ ), throughput remains nearly constant "
            "for all $f_2 < 1$",
            f"{min(flat):,.0f} to {max(flat):,.0f} tokens/s at f1 = 0.8",
            min(flat) > 0.9 * max(flat) and rate[0.4, 0.0] < 0.7 * rate[0.8, 0.0],
            "agrees if within a tenth there, and at f1 = 0.4 less than 70 % of it with f2 = 0",
            printed="0.8",
        ),
    ]
    bars = Bars(
        "500 requests of 10,000 tokens",
        "tokens/s",
        [f"f1 = {first:g}" for first in FIRSTS],
        {f"f2 = {second:g}": [rate[first, second] for first in FIRSTS] for second in SECONDS},
        form=",.0f",
    )
    return Result(columns, rows, claims, [CHAPTER_3_NOTE], Picture("FEATHER Fig. 3.9: partly shared", [bars]))


# -- Experiment 7

SIZES = (5, 10, 25, 50, 100, 200, 300, 500)
KINDS = {"5 prefixes": 5, "one prefix": 1}
SATURATED = 0.9


@figure("feather-fig3.10", PAPER, "§3.3, Fig. 3.10", "throughput by batch size")
def fig3_10(given: Given) -> Result:
    rows: list[dict[str, Value]] = []
    rate: dict[str, dict[int, float]] = {kind: {} for kind in KINDS}
    for kind, groups in KINDS.items():
        for size in SIZES:
            given.tell(f"{kind}, {size} requests")
            run = one_batch(grouped(size, groups, LENGTH), OUTPUT_TOKENS, Server())
            rate[kind][size] = run.decode_tokens_s
            rows.append(row(run, kind=kind, size=size))
    columns = [Column("kind", "batch"), Column("size", "requests", "d"), DECODED]
    full = {
        kind: next(size for size in SIZES if rates[size] >= SATURATED * max(rates.values()))
        for kind, rates in rate.items()
    }
    several, one = KINDS
    section = Section("§3.3, Experiment 7")
    claims = [
        section.says(
            "the saturation throughput is higher in the homogeneous case due to greater locality",
            f"{max(rate[one].values()):,.0f} and {max(rate[several].values()):,.0f} tokens/s",
            max(rate[one].values()) > max(rate[several].values()),
            "as in Experiment 1",
            basis=Basis.CONSTRUCTION,
        ),
        section.says(
            "the batch size at which throughput saturates is higher for the homogeneous workload",
            f"{full[one]} and {full[several]} requests",
            full[one] > full[several],
            "Takeaway 7; where nine tenths of the most are reached. Tensor cores are not modelled",
        ),
    ]
    values = {kind: [*rates.values()] for kind, rates in rate.items()}
    bars = decoded("prefixes of 10,000 tokens", [str(size) for size in SIZES], values)
    return Result(columns, rows, claims, [CHAPTER_3_NOTE], Picture("FEATHER Fig. 3.10: batch size", [bars]))


# -- Experiment 8

SPLITS = (1, 2, 4, 8, 16, 32)
PREFIXES, EACH = 8, 100
OUTPUTS = (1, 10, 20, 50, 100)


@figure("feather-fig3.11", PAPER, "§3.3, Fig. 3.11", "small batches of one prefix")
def fig3_11(given: Given) -> Result:
    count = PREFIXES * EACH
    prompts: list[Parts] = [[(f"prefix {place // EACH}", LENGTH), (f"own {place}", SUFFIX)] for place in range(count)]
    rows: list[dict[str, Value]] = []
    rate: dict[tuple[int, int], float] = {}
    for output_tokens in OUTPUTS:
        for split in SPLITS:
            size = count // split
            given.tell(f"{split} x {size}, {output_tokens} tokens")
            groups = [prompts[at : at + size] for at in range(0, count, size)]
            run = batches(groups, output_tokens, Server(max_batch=count))
            rate[split, output_tokens] = run.tokens_s
            rows.append(row(run, batches=f"{split} x {size}", output_tokens=output_tokens))
    columns = [Column("output_tokens", "decode tokens", "d"), Column("batches", "batches"), OVERALL]
    short, long = OUTPUTS[0], OUTPUTS[-1]
    over = {split: rate[split, long] / rate[1, long] for split in SPLITS}
    told = ", ".join(f"{split} x {count // split}: {each:.2f}" for split, each in over.items())
    section = Section("§3.3, Experiment 8")
    claims = [
        section.says(
            "at longer decode lengths, fully homogeneous batches ( $8 \\times 100$ ) significantly improve "
            "throughput despite smaller batch sizes",
            told,
            over[8] > 1.2 and over[8] == max(over.values()),
            f"times 1 x {count}, at {long} tokens, prompts included; agrees if by a fifth, and no other strategy is "
            "better",
        ),
        section.says(
            "even $16 \\times 50$ continues to outperform $1 \\times 800$ at large decode lengths",
            f"{over[16]:.2f}×",
            over[16] > 1,
            "Takeaway 8",
        ),
        section.says(
            "Only when batches become too small ( $32 \\times 25$ ) does throughput decline again",
            f"{over[32]:.2f}× that of 1 x {count}, {over[32] / over[8]:.2f}× that of 8 x {EACH}",
            over[32] < over[16],
            "the weights are read for 25 requests only",
        ),
        section.says(
            "For small decode lengths, throughput is dominated by prefill, and large heterogeneous batches perform "
            "the best",
            ", ".join(f"{split} x {count // split}: {rate[split, short]:.1f}" for split in SPLITS),
            rate[1, short] >= max(rate[split, short] for split in SPLITS),
            "tokens/s with one token each. A prompt token takes as long in any batch here, so nothing is lost by "
            "splitting and all are equal but for rounding",
        ),
    ]
    bars = Bars(
        f"{count} requests, 8 prefixes",
        f"times 1 x {count}",
        [str(each) for each in OUTPUTS],
        {f"{split} x {count // split}": [rate[split, each] / rate[1, each] for each in OUTPUTS] for split in SPLITS},
        form=".2f",
    )
    return Result(columns, rows, claims, [CHAPTER_3_NOTE], Picture("FEATHER Fig. 3.11: batches", [bars]))
