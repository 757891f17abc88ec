"""FEATHER §3.2 and §3.3: the gain in decoding by a prefix that a whole batch shares.

The gain is shown by share of requests, share of the prompt, groups, levels of a tree, prefix lengths with a small
model, and batch sizes."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

from pinyon_lab.figures.figure import Basis, Column, FigureInputs, Result, Table, figure
from pinyon_lab.figures.rows import bars, near
from pinyon_lab.papers.feather.runs import (
    CHAPTER_3_NOTE,
    MAX_BATCH,
    PAPER,
    BatchRun,
    FeatherServer,
    Parts,
    batches,
    one_batch,
    tree,
)
from pinyon_lab.pictures import Bars

REQUESTS = MAX_BATCH
OUTPUT_TOKENS = 50
"""The output tokens of Experiment 1; the paper does not print those of the others."""
SUFFIX = 20
LEVEL = 0.03
"""Our choice: a difference up to this counts as none."""

DECODED = Column("decode_tokens_s", "decoded, tokens/s", ",.0f", Basis.MODELLED)
OVERALL = Column("tokens_s", "tokens/s", ",.0f", Basis.MODELLED)
BATCH = Column("batch", "batch", ".0f", Basis.MODELLED)
KV = Column("kv_tokens", "KV read per step, tokens", ",.0f", Basis.MODELLED)
EVICTED = Column("evicted", "evicted blocks", ",d", Basis.MODELLED)


class _Table(Table):
    """The columns of an experiment of this chapter, and a row for each run."""

    def __init__(self, given: FigureInputs, experiment: int, *columns: Column, basis: Basis = Basis.MODELLED) -> None:
        super().__init__(given, *columns, section=f"{given.section}, Experiment {experiment}", basis=basis)

    def ran(self, run: BatchRun, *what: float | str) -> None:
        """Adds a row of a run; ``what`` are the values of the first columns, and the run gives the others."""
        numbers = run._asdict()
        self.add(*what, *(numbers[column.key] for column in self.columns[len(what) :]), **numbers)

    def by_one(self, title: str, form: str) -> Bars:
        """Returns the decoding rates by the first column, whose values are shown in ``form``."""
        key = self.columns[0].key
        values = {(each[key], "tokens/s"): each[DECODED.key] for each in self.rows}
        return bars(title, DECODED.title, values, ",.0f", group=form.format)

    def by_two(self, key: str = DECODED.key) -> dict[tuple[Any, Any], float]:
        """Returns the rates by the first two columns."""
        return self.rows.cells(self.columns[0].key, self.columns[1].key, key)


def _own(place: int) -> tuple[str, int]:
    return f"own {place}", SUFFIX


def _some(*parts: tuple[str, int]) -> Parts:
    return [part for part in parts if part[1]]


SHARES = (0.0, 0.002, 0.1, 0.25, 0.5, 0.75, 0.9, 0.998, 1.0)
PREFIX = 10_000


@figure("feather-fig3.2", PAPER, "§3.2, Fig. 3.2", "two prefixes in a batch")
def fig3_2(given: FigureInputs) -> Result:
    table = _Table(given, 1, Column("share", "on prefix A", ".1%"), DECODED, KV, BATCH, basis=Basis.CONSTRUCTION)
    for share in SHARES:
        given.tell(f"{share:.1%} on prefix A")
        first = round(REQUESTS * share)
        names = ["A" if place < first else "B" for place in range(REQUESTS)]
        table.ran(one_batch([[(name, PREFIX), _own(place)] for place, name in enumerate(names)], OUTPUT_TOKENS), share)
    rates, reads = (table.rows.column(key) for key in ("decode_tokens_s", "kv_tokens"))
    same, mixed = (rates[0], rates[-1]), rates[1:-1]
    drop, read = min(same) / rates[1], reads[1] / reads[0]
    table.finds(
        "even a single request from the other prefix group (e.g., $f = 0.002$ ) causes throughput to drop by "
        "nearly $2\\times$",
        near(drop, 2.0, text="nearly 2×"),
        "the gain was put in, between what Experiments 1 and 2 print; that one request takes all of it is the "
        "formula's; agrees within a fifth",
    )
    table.says(
        "the throughput is highest for fully homogeneous batches",
        f"{min(same):,.0f} against at most {max(mixed):,.0f} tokens/s",
        min(same) > max(mixed),
        "Takeaway 1",
    )
    table.says(
        "greater temporal locality in prefix-homogeneous batches reduces the total data fetched from DRAM",
        f"{read:.2f} times as much is read per step at f = 0.002",
        read > 1,
        "tokens whose KV a step reads stand in for DRAM activity. Of the paper's two effects, higher bandwidth "
        "(over 40 %) and less data, the model has one number for both, so its 40 % cannot be compared",
    )
    panel = table.by_one("500 requests on two prefixes of 10,000 tokens", "{:g}")
    return table.result("FEATHER Fig. 3.2: two prefixes", [panel], [CHAPTER_3_NOTE])


FRACTIONS = tuple(tenth / 10 for tenth in range(11))
HUNDRED, LENGTH = 100, 2_000


@figure("feather-fig3.4", PAPER, "§3.2, Fig. 3.4", "how much of the prompt is shared")
def fig3_4(given: FigureInputs) -> Result:
    table = _Table(given, 2, Column("fraction", "shared", ".0%"), DECODED, KV, EVICTED)
    for fraction in FRACTIONS:
        given.tell(f"{fraction:.0%} shared")
        shared = round(LENGTH * fraction)
        prompts = [_some(("shared", shared), (f"own {place}", LENGTH - shared)) for place in range(HUNDRED)]
        table.ran(one_batch(prompts, OUTPUT_TOKENS), fraction)
    rates, evicted = (table.rows.column(key) for key in ("decode_tokens_s", "evicted"))
    gain = rates[-1] / rates[0] - 1
    steps = [after / before - 1 for before, after in pairwise(rates)]
    table.says(
        "reaching over 60% higher throughput at $f = 1$",
        f"{gain:.0%}",
        gain > 0.6,
        "the gain was put in, between what Experiments 1 and 2 print: one share for all lengths does not have both",
        printed="over 60%",
        basis=Basis.CONSTRUCTION,
    )
    table.says(
        "throughput increases smoothly with $f$",
        f"by {min(steps):.1%} to {max(steps):.1%} with each tenth",
        min(steps) > 0 and max(steps) < 0.15,
        "Takeaway 2; agrees if no tenth brings less than the one before it or more than 15 %",
    )
    table.says(
        "The KV caches fit into GPU memory for all values of $f$",
        f"{max(evicted):,.0f} blocks evicted",
        not any(evicted),
        "219,922 tokens",
    )
    panel = table.by_one("100 requests of 2,000 tokens", "{:g}")
    return table.result("FEATHER Fig. 3.4: fraction shared", [panel], [CHAPTER_3_NOTE])


GROUPS = (1, 2, 5, 10, 20, 50, 100)


def _grouped(count: int, groups: int, prefix: int) -> list[Parts]:
    return [[(f"prefix {place % groups}", prefix), _own(place)] for place in range(count)]


@figure("feather-fig3.5", PAPER, "§3.2, Fig. 3.5", "number of prefix groups")
def fig3_5(given: FigureInputs) -> Result:
    table = _Table(given, 3, Column("groups", "prefixes", "d"), OVERALL, DECODED, BATCH, EVICTED)
    for groups in GROUPS:
        given.tell(f"{groups} prefixes")
        table.ran(one_batch(_grouped(REQUESTS, groups, PREFIX), OUTPUT_TOKENS), groups)
    rate, batch, evicted = (
        dict(zip(GROUPS, table.rows.column(key), strict=True)) for key in ("tokens_s", "batch", "evicted")
    )
    middle = [rate[groups] for groups in GROUPS if 2 <= groups <= 20]
    table.says(
        "throughput drops from $N = 1$ to $N = 2$ due to reduced temporal and spatial locality",
        f"to {rate[2] / rate[1]:.0%}",
        rate[2] < 0.8 * rate[1],
        "as in Experiment 1; agrees if by more than a fifth",
        basis=Basis.CONSTRUCTION,
    )
    table.says(
        "from $N = 2$ to $N = 20$ , throughput remains stable",
        f"{min(middle):,.0f} to {max(middle):,.0f} tokens/s",
        min(middle) >= 0.8 * max(middle),
        "Takeaway 3; agrees if within a fifth",
    )
    table.says(
        "throughput drops sharply from $N = 20$ to $N = 100$ , as GPU memory can no longer hold KV caches for "
        "all active prefixes",
        f"to {rate[100] / rate[20]:.0%}; {evicted[100]:,.0f} blocks evicted",
        rate[100] < 0.5 * rate[20],
        "nothing was put in but the size of the memory. Prefixes come in turn here, so that each is evicted "
        "before its next request",
    )
    table.says(
        "The impact is also visible through the reduced average batch size for $N = 50$ and $N = 100$",
        ", ".join(f"{groups}: {batch[groups]:.0f}" for groups in (10, 20, 50, 100)),
        max(batch[50], batch[100]) < 0.5 * batch[20],
        "requests of a step. At 20 prefixes of 10,000 tokens memory is nearly full already",
    )
    names = [str(each) for each in GROUPS]
    panels = [
        Bars("500 requests on so many prefixes", "tokens/s", names, {"tokens/s": [*rate.values()]}, form=",.0f"),
        Bars("the same", "requests of a step", names, {"batch": [*batch.values()]}, form=".0f"),
    ]
    return table.result("FEATHER Fig. 3.5: groups", panels, [CHAPTER_3_NOTE])


LENGTHS = (500, 1_000, 2_000)
"""Our choice of L: the text has three values and prints none."""
LEVELS = (1, 2, 3, 4)


@figure("feather-fig3.6", PAPER, "§3.2, Fig. 3.6", "trees of one to four levels")
def fig3_6(given: FigureInputs) -> Result:
    table = _Table(given, 4, Column("length", "L", ",d"), Column("levels", "levels", "d"), DECODED, KV)
    for length, levels in product(LENGTHS, LEVELS):
        given.tell(f"{levels} levels of a prompt of {4 * length}")
        leaves = 1 << (levels - 1)
        prompts = [[*tree(place % leaves, levels, 4 * length), _own(place)] for place in range(REQUESTS)]
        table.ran(one_batch(prompts, OUTPUT_TOKENS), length, levels)
    rate = table.by_two()
    deeper = {length: [rate[length, levels] for levels in LEVELS[1:]] for length in LENGTHS}
    spread = [max(rates) / min(rates) - 1 for rates in deeper.values()]
    table.says(
        "a single level of radix tree has the highest performance because of maximum locality",
        ", ".join(f"L = {length}: {rate[length, 1] / rate[length, 2]:.2f} times that of two" for length in LENGTHS),
        all(rate[length, 1] > max(rates) for length, rates in deeper.items()),
        "of each L",
    )
    table.says(
        "radix trees with 2, 3, and 4 levels exhibit similar throughput across different values of $L$",
        f"{max(spread):.1%} apart at most",
        max(spread) <= LEVEL,
        "Takeaway 4: in the formula only what the whole batch shares counts",
        basis=Basis.CONSTRUCTION,
    )
    title, level = "500 requests of 4L tokens", lambda levels: f"{levels} level{'s' * (levels > 1)}"
    panel = bars(title, DECODED.title, rate, ",.0f", group="L = {:,}".format, label=level)
    return table.result("FEATHER Fig. 3.6: trees", [panel], [CHAPTER_3_NOTE])


SMALL_MODEL = "rtx6000ada-qwen-0.5b"
SMALL_PREFIXES = (100, 500, 1_000, 5_000, 10_000)
"""Our choice, as the groups are: the text prints neither."""
FEW_GROUPS = (1, 2, 5, 20)
SHORT, DROP = 0.05, 0.2
"""Our choice: the greatest loss that counts as no drop, and the least that counts as one."""


@figure("feather-fig3.8", PAPER, "§3.2, Fig. 3.8", "prefix lengths and groups, Qwen 0.5B")
def fig3_8(given: FigureInputs) -> Result:
    size = Column("mb", "their KV, MB", ",.0f")
    table = _Table(given, 5, Column("length", "prefix", ",d"), Column("groups", "prefixes", "d"), size, DECODED)
    for length, groups in product(SMALL_PREFIXES, FEW_GROUPS):
        given.tell(f"{groups} prefixes of {length} tokens")
        run = one_batch(_grouped(REQUESTS, groups, length), OUTPUT_TOKENS, FeatherServer(machine=SMALL_MODEL))
        table.ran(run, length, groups, 12_288 * length * groups / 1e6)
    rate = table.by_two()
    drops = {length: 1 - rate[length, 2] / rate[length, 1] for length in SMALL_PREFIXES}
    told = ", ".join(f"{length:,}: {drop:.0%}" for length, drop in drops.items())
    after = max(
        abs(rate[length, groups] / rate[length, 2] - 1) for length in SMALL_PREFIXES for groups in FEW_GROUPS[1:]
    )
    by_groups = ([rate[length, groups] for length in SMALL_PREFIXES] for groups in FEW_GROUPS)
    fell = all(rates == sorted(rates, reverse=True) for rates in by_groups)
    table.says(
        "this drop from 1 to 2 prefix groups is observable only for larger shared prefix lengths",
        told,
        drops[SMALL_PREFIXES[0]] < SHORT and drops[SMALL_PREFIXES[-1]] > DROP,
        "the formula gives that by itself: what a short prefix saves is little beside weights and 50 µs a "
        "request. Agrees if the shortest loses less than 5 % and the longest more than 20 %",
    )
    table.says(
        "Beyond this point, however, throughput remains relatively stable",
        f"{after:.1%} from that of two prefixes at most",
        after <= SHORT,
        "only what all share counts",
        basis=Basis.CONSTRUCTION,
    )
    table.says(
        "throughput decreases as the prefix sequence length increases",
        "at every number of groups" if fell else "not everywhere",
        fell,
    )
    table.says(
        "no clear throughput degradation is observed once this threshold is exceeded",
        "no threshold at 96 MB",
        True,
        "Takeaway 5: the formula knows no size of a cache",
        basis=Basis.CONSTRUCTION,
    )
    title, prefixes = "500 requests, Qwen 0.5B", lambda groups: f"{groups} prefix{'es' * (groups > 1)}"
    panel = bars(title, DECODED.title, rate, ",.0f", group="{:,}".format, label=prefixes)
    return table.result("FEATHER Fig. 3.8: lengths and groups", [panel], [CHAPTER_3_NOTE])


FIRSTS = (0.0, 0.4, 0.8, 0.9, 1.0)
SECONDS = (0.0, 0.5, 0.8, 1.0)
SUFFIXES = 50


@figure("feather-fig3.9", PAPER, "§3.2, Fig. 3.9", "partly shared prompts")
def fig3_9(given: FigureInputs) -> Result:
    table = _Table(given, 6, Column("first", "f1", ".0%"), Column("second", "f2", ".0%"), OVERALL, BATCH, EVICTED)
    for first, second in product(FIRSTS, SECONDS):
        given.tell(f"{first:.0%} shared by all, {second:.0%} with suffix A")
        shared, same = round(PREFIX * first), round(REQUESTS * second)
        prompts = []
        for place in range(REQUESTS):
            suffix = "A" if place * same // REQUESTS < (place + 1) * same // REQUESTS else f"B{place % SUFFIXES}"
            prompts.append(_some(("shared", shared), (suffix, PREFIX - shared)))
        table.ran(one_batch(prompts, OUTPUT_TOKENS), first, second)
    rate = table.by_two(OVERALL.key)
    jump = {first: rate[first, 1.0] / rate[first, 0.8] for first in FIRSTS if first < 1}
    flat = [rate[0.8, second] for second in SECONDS if second < 1]
    table.says(
        "we observe a sharp increase in throughput when $f_2$ changes from 0.8 to 1",
        ", ".join(f"f1 {first:g}: {each:.2f}×" for first, each in jump.items()),
        min(jump.values()) > 1.1,
        "Takeaway 6; agrees if by a tenth at every f1 below 1",
    )
    table.says(
        "increasing $f_1$ improves throughput due to enhanced temporal and spatial locality",
        ", ".join(f"{first:g}: {rate[first, 0.5]:,.0f}" for first in FIRSTS),
        [rate[first, 0.5] for first in FIRSTS] == sorted(rate[first, 0.5] for first in FIRSTS),
        "tokens/s at f2 = 0.5",
    )
    table.says(
        "once the working set fits within GPU memory (around $f_1 = 0.8$ ), throughput remains nearly constant "
        "for all $f_2 < 1$",
        f"{min(flat):,.0f} to {max(flat):,.0f} tokens/s at f1 = 0.8",
        min(flat) > 0.9 * max(flat) and rate[0.4, 0.0] < 0.7 * rate[0.8, 0.0],
        "agrees if within a tenth there, and at f1 = 0.4 less than 70 % of it with f2 = 0",
        printed="0.8",
    )
    title, one, other = "500 requests of 10,000 tokens", "f1 = {:g}".format, "f2 = {:g}".format
    panel = bars(title, OVERALL.title, rate, ",.0f", group=one, label=other)
    return table.result("FEATHER Fig. 3.9: partly shared", [panel], [CHAPTER_3_NOTE])


SIZES = (5, 10, 25, 50, 100, 200, 300, 500)
KINDS = {"5 prefixes": 5, "one prefix": 1}
SATURATED = 0.9


@figure("feather-fig3.10", PAPER, "§3.3, Fig. 3.10", "throughput by batch size")
def fig3_10(given: FigureInputs) -> Result:
    table = _Table(given, 7, Column("kind", "batch"), Column("size", "requests", "d"), DECODED)
    for (kind, groups), size in product(KINDS.items(), SIZES):
        given.tell(f"{kind}, {size} requests")
        table.ran(one_batch(_grouped(size, groups, PREFIX), OUTPUT_TOKENS), kind, size)
    rate = table.by_two()
    most = {kind: max(rate[kind, size] for size in SIZES) for kind in KINDS}
    full = {kind: next(size for size in SIZES if rate[kind, size] >= SATURATED * most[kind]) for kind in KINDS}
    several, one = KINDS
    table.says(
        "the saturation throughput is higher in the homogeneous case due to greater locality",
        f"{most[one]:,.0f} and {most[several]:,.0f} tokens/s",
        most[one] > most[several],
        "as in Experiment 1",
        basis=Basis.CONSTRUCTION,
    )
    table.says(
        "the batch size at which throughput saturates is higher for the homogeneous workload",
        f"{full[one]} and {full[several]} requests",
        full[one] > full[several],
        "Takeaway 7; where nine tenths of the most are reached. Tensor cores are not modelled",
    )
    by_size = {(size, kind): rate[kind, size] for kind, size in rate}
    panel = bars("prefixes of 10,000 tokens", DECODED.title, by_size, ",.0f")
    return table.result("FEATHER Fig. 3.10: batch size", [panel], [CHAPTER_3_NOTE])


SPLITS = (1, 2, 4, 8, 16, 32)
PREFIXES, EACH = 8, 100
OUTPUTS = (1, 10, 20, 50, 100)


@figure("feather-fig3.11", PAPER, "§3.3, Fig. 3.11", "small batches of one prefix")
def fig3_11(given: FigureInputs) -> Result:
    count = PREFIXES * EACH
    prompts: list[Parts] = [[(f"prefix {place // EACH}", PREFIX), _own(place)] for place in range(count)]
    table = _Table(given, 8, Column("output_tokens", "decode tokens", "d"), Column("batches", "batches"), OVERALL)
    names = {split: f"{split} x {count // split}" for split in SPLITS}
    for output_tokens, (split, name) in product(OUTPUTS, names.items()):
        given.tell(f"{name}, {output_tokens} tokens")
        groups = [prompts[at : at + count // split] for at in range(0, count, count // split)]
        table.ran(batches(groups, output_tokens, FeatherServer(max_batch=count)), output_tokens, name)
    rate = table.by_two(OVERALL.key)
    to_one = {(tokens, name): each / rate[tokens, names[1]] for (tokens, name), each in rate.items()}
    short, over = OUTPUTS[0], {split: to_one[OUTPUTS[-1], name] for split, name in names.items()}
    told = ", ".join(f"{names[split]}: {each:.2f}" for split, each in over.items())
    table.says(
        "at longer decode lengths, fully homogeneous batches ( $8 \\times 100$ ) significantly improve "
        "throughput despite smaller batch sizes",
        told,
        over[8] > 1.2 and over[8] == max(over.values()),
        f"times 1 x {count}, at {OUTPUTS[-1]} tokens, prompts included; agrees if by a fifth, and no other "
        "strategy is better",
    )
    table.says(
        "even $16 \\times 50$ continues to outperform $1 \\times 800$ at large decode lengths",
        f"{over[16]:.2f}×",
        over[16] > 1,
        "Takeaway 8",
    )
    table.says(
        "Only when batches become too small ( $32 \\times 25$ ) does throughput decline again",
        f"{over[32]:.2f}× that of 1 x {count}, {over[32] / over[8]:.2f}× that of 8 x {EACH}",
        over[32] < over[16],
        "the weights are read for 25 requests only",
    )
    table.says(
        "For small decode lengths, throughput is dominated by prefill, and large heterogeneous batches perform "
        "the best",
        ", ".join(f"{name}: {rate[short, name]:.1f}" for name in names.values()),
        rate[short, names[1]] >= max(rate[short, name] for name in names.values()),
        "tokens/s with one token each. A prompt token takes as long in any batch here, so nothing is lost by "
        "splitting and all are equal but for rounding",
    )
    panel = bars(f"{count} requests, 8 prefixes", f"times 1 x {count}", to_one, ".2f")
    return table.result("FEATHER Fig. 3.11: batches", [panel], [CHAPTER_3_NOTE])
