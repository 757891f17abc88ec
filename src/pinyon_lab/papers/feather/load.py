"""FEATHER §5.2.1 to §5.2.7: a server under load, with the same columns for each run.

What varies is the request rate, the prefix groups, output tokens, prefix tokens, levels of prefix trees, or the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pinyon_lab.figures.figure import Basis, Column, FigureInputs, Result, Table, Value, columns, figure
from pinyon_lab.figures.rows import bars, every, near, told
from pinyon_lab.papers.feather.runs import (
    FCFS,
    MACHINE,
    MAX_BATCH,
    NOTES,
    OWN_TOKENS,
    PAPER,
    FeatherLoad,
    FeatherServed,
    FeatherServer,
    batches,
    label,
    served,
)

Runs = dict[tuple[str, str], FeatherServed]
"""The runs by the value that varies, and by the system's label in tables."""

FEATHER = "bandit"
"""The policy of the paper's results (§5.2)."""
SOME = (FCFS, "bandit", "sglang_fcfs", "lpm")
"""The policies where not all are compared."""

SERVED = [
    *columns(Basis.MODELLED, tokens_s=("tokens/s", ",.0f"), batch=("batch", ".0f"), tbt_ms=("TBT, ms", ",.0f")),
    *columns(Basis.MODELLED, ttft_s=("TTFT P50, s", ".1f"), evicted=("evicted blocks", ",d")),
    *columns(Basis.MODELLED, computed=("prompt tokens computed", ".1%")),
]
STALLED = [
    *SERVED[:3],
    *columns(Basis.MODELLED, stalled=("waits for the scheduler", ".1%"), reading=("memory is read", ".1%")),
    *columns(Basis.MODELLED, read_s=("read in all, s", ",.1f"), computing=("compute", ".1%")),
]


def stalled(*keys: str) -> list[Column]:
    """Returns columns of runs whose engine may wait for its scheduler."""
    return [column for column in STALLED if column.key in keys]


class Sweep(Table):
    """Runs by a value that varies and by system, a row each; ``shown`` are their numbers."""

    def __init__(self, given: FigureInputs, varied: str, runs: Runs, shown: Sequence[Column] = SERVED) -> None:
        super().__init__(given, *columns(at=varied, policy="policy"), *shown)
        for (at, name), run in runs.items():
            self.add(at, name, *numbers(run, shown).values())

    def value(self, at: str, policy: str, key: str = "tokens_s") -> float:
        return float(self.rows.cell(key, at=at, policy=label(policy)))

    def ratios(self, policy: str = FEATHER, to: str = FCFS, key: str = "tokens_s") -> dict[str, float]:
        """Returns the ratio of ``policy`` to ``to`` in column ``key``, by varied value."""
        one, other = (self.rows.by("at", key, policy=label(each)) for each in (policy, to))
        return {at: value / other[at] for at, value in one.items()}

    def drawn(self, title: str, notes: Sequence[str] = NOTES, shown: Sequence[Column] = (), axis: str = "") -> Result:
        """Returns the result with bars of ``shown``, by default of all columns, by varied value, called ``axis``."""
        by = f"by {axis or self.columns[0].title}"
        shown = shown or self.columns[2:]
        panels = [bars(by, each.title, self.rows.cells("at", "policy", each.key), each.form) for each in shown]
        return self.result(title, panels, notes)


def sweep(
    given: FigureInputs,
    varied: str,
    loads: Mapping[str, FeatherLoad],
    policies: Sequence[str],
    machines: Mapping[str, str] = {},
) -> Sweep:
    """Runs each load with each policy; ``loads`` are by the value that varies, as text, as ``machines`` are."""
    runs = {
        (at, label(policy)): served(load, FeatherServer(policy, machines.get(at, MACHINE)), given.tell)
        for at, load in loads.items()
        for policy in policies
    }
    return Sweep(given, varied, runs)


def numbers(run: FeatherServed, shown: Sequence[Column] = SERVED) -> dict[str, Value]:
    found: dict[str, Value] = {**run._asdict(), "tbt_ms": 1e3 * run.tbt_s, "reading": run.reading}
    return {column.key: found[column.key] for column in shown}


def apart(load: FeatherLoad) -> float:
    """Returns the output tokens/s if one prefix is served after the other, a full batch of each. No batches are more
    homogeneous."""
    group = [[("prefix", load.prefix_tokens), (f"own {each}", OWN_TOKENS)] for each in range(MAX_BATCH)]
    return batches([group], load.output_tokens).tokens_s


RATES = (5, 10, 20, 50, 100)
ALL = (FCFS, "bandit", "q_learning", "heuristic", "dynamic", "sglang_fcfs", "lpm", "dfs_weight")
SGLANG = ("sglang_fcfs", "lpm", "dfs_weight")


@figure("feather-fig5.1", PAPER, "§5.2.1, Fig. 5.1", "throughput by request rate")
def fig5_1(given: FigureInputs) -> Result:
    table = sweep(given, "rate", {f"{rate}/s": FeatherLoad(rate=rate) for rate in RATES}, ALL)
    most, gains = f"{max(RATES)}/s", table.ratios()
    bound = apart(FeatherLoad()) / table.value(most, FCFS)
    others = {at: max(table.value(at, policy) for policy in ALL[4:]) for at in gains}
    tbt = {policy: table.value(most, policy, "tbt_ms") for policy in ALL}
    table.finds(
        "At 100 req/s, FEATHER achieves roughly $4\\times$ the throughput of vLLM (FCFS)",
        near(gains[most], 4.0, text="4×"),
        f"the gain that §3.2 prints leaves no more than {bound:.2f}× here, for batches of 500 requests on one "
        "prefix; §3.2's nearly 2× is of prefixes twice as long, where there is more to gain. The rest: who is "
        "admitted are 500 of five prefixes, in batches of 100 that read the weights once each",
    )
    table.finds(
        "FEATHER (on vLLM) consistently outperforms all baselines at every request rate",
        every({at: table.value(at, FEATHER) / others[at] for at in gains}, lambda ratio: ratio > 0.99),
        "against the best one at each rate; agrees if nowhere more than 1 % behind it",
    )
    table.finds(
        "FEATHER in general maintains a *smaller* average batch size than vLLM (FCFS)",
        every(table.ratios(key="batch"), lambda ratio: ratio <= 1.01),
        "times that of fcfs",
    )
    table.says(
        "SGLang policies consistently operate at smaller batch sizes than vLLM",
        ", ".join(f"{policy} {table.value(most, policy, 'batch'):.0f}" for policy in (FCFS, *SGLANG)),
        all(table.value(most, policy, "batch") < table.value(most, FCFS, "batch") for policy in SGLANG),
        "at the highest rate. `sglang_fcfs` counts what is shared for each request; `lpm` and `dfs_weight` are "
        "orders of the line only, and do not",
    )
    table.finds(
        "Dynamic Batching performs similarly to vLLM (FCFS), as all KV caches fit within GPU memory",
        every(table.ratios("dynamic"), lambda ratio: abs(ratio - 1) < 0.05),
        "times fcfs, by rate",
    )
    table.says(
        "FEATHER (on vLLM) achieves substantially lower TBT than all baselines except SGLang (FCFS)",
        ", ".join(f"{policy} {each:,.0f} ms" for policy, each in tbt.items()),
        tbt["sglang_fcfs"] < tbt[FEATHER] < 0.9 * min(tbt[policy] for policy in (FCFS, "dynamic", "lpm", "dfs_weight")),
        "at the highest rate",
    )
    table.finds(
        "bandit and Q-learning approaches perform similarly across most settings",
        every(table.ratios("q_learning", "bandit"), lambda ratio: abs(ratio - 1) < 0.1),
        "Q-learning over the bandit, by rate; agrees if within a tenth. It explores for longer, and runs are "
        "short: ε falls by 3 % a round",
        section="§5.2",
    )
    return table.drawn("FEATHER Fig. 5.1: request rate", shown=SERVED[:3])


GROUPS = (1, 2, 5, 20, 50, 100)


@figure("feather-fig5.2", PAPER, "§5.2.2, Fig. 5.2", "throughput by prefix groups")
def fig5_2(given: FigureInputs) -> Result:
    table = sweep(given, "groups", {f"{groups}": FeatherLoad(groups=groups) for groups in GROUPS}, SOME)
    gains = table.ratios()
    given.tell("one prefix after the other")
    bound = apart(FeatherLoad()) / table.value("100", FCFS)
    fcfs = {groups: table.value(str(groups), FCFS) for groups in GROUPS}
    own = [table.value(str(groups), FEATHER) for groups in GROUPS]
    table.finds(
        "At 100 prefix groups, FEATHER achieves $10\\times$ higher throughput than vLLM (FCFS)",
        near(gains["100"], 10.0, text="10×"),
        f"fcfs computes {table.value('100', FCFS, 'computed'):.0%} of all prompt tokens, feather "
        f"{table.value('100', FEATHER, 'computed'):.0%}: evictions are avoided. What bounds the rest is that "
        "1,000 requests are ten of each "
        "prefix, and batches of ten read the weights for little. With 500 requests of a prefix in a batch "
        f"it would be {bound:.1f}×",
    )
    table.says(
        "This leads to a sharp throughput drop for vLLM (FCFS), even when increasing from 1 to 2 prefix groups",
        f"to {fcfs[2] / fcfs[1]:.0%}",
        fcfs[2] < 0.8 * fcfs[1],
        "as in Fig. 3.2",
        basis=Basis.CONSTRUCTION,
    )
    table.says(
        "beyond 20 groups, the KV cache footprint exceeds HBM capacity, causing a sharp reduction in batch size "
        "and increased recomputation",
        f"batch {table.value('20', FCFS, 'batch'):.0f} and {table.value('50', FCFS, 'batch'):.0f} with 20 and 50 "
        "groups, computed "
        f"{table.value('20', FCFS, 'computed'):.0%} and {table.value('50', FCFS, 'computed'):.0%}",
        table.value("50", FCFS, "batch") < 0.5 * table.value("20", FCFS, "batch"),
        "nothing was put in but the size of the memory",
    )
    table.says(
        "FEATHER maintains a more stable batch size and throughput across all prefix group configurations",
        f"{max(own) / min(own):.1f} between its most and least throughput, fcfs "
        f"{max(fcfs.values()) / min(fcfs.values()):.1f}",
        max(own) / min(own) < max(fcfs.values()) / min(fcfs.values()),
        "with 20 groups feather does what fcfs does: batches of 25 are slower than one of 500, and the bandit "
        "finds that out",
    )
    table.says(
        "SGLang's LPM and DFS-W policies partially mitigate evictions, achieving higher throughput than FCFS "
        "(SGLang) at larger group counts",
        told(table.ratios("lpm", "sglang_fcfs")),
        all(table.ratios("lpm", "sglang_fcfs")[at] > 1 for at in ("50", "100")),
        "lpm over sglang_fcfs. lpm orders as well as feather's tree does, so with 100 groups it is as fast: its "
        "cost on the CPU, which is left out, is what sets the two apart in the paper",
    )
    return table.drawn("FEATHER Fig. 5.2: prefix groups", shown=SERVED[:2])


OUTPUTS = (1, 5, 20, 50, 100, 200)


@figure("feather-fig5.3", PAPER, "§5.2.3, Fig. 5.3", "throughput by decode tokens")
def fig5_3(given: FigureInputs) -> Result:
    table = sweep(given, "tokens", {f"{tokens}": FeatherLoad(output_tokens=tokens) for tokens in OUTPUTS}, SOME)
    gains = table.ratios()
    best = max(table.value("200", policy) for policy in ("sglang_fcfs", "lpm"))
    own = {str(tokens): table.value(str(tokens), FEATHER, "batch") for tokens in OUTPUTS}
    table.finds(
        "In the prefill-dominated regime (1–20 tokens), all policies behave similarly",
        every({at: gains[at] for at in ("1", "5", "20")}, lambda ratio: abs(ratio - 1) < 0.1),
        "feather over fcfs; agrees if within a tenth",
    )
    table.says(
        "Beyond 20 tokens, the policies diverge sharply",
        told({at: gains[at] for at in ("50", "100", "200")}),
        gains["200"] > max(1.2, gains["50"]),
        "feather over fcfs; agrees if by a fifth at 200 tokens, and by more than at 50",
    )
    table.finds(
        "reaching $\\sim 3800$ toks/s at 200 tokens—over $3\\times$ higher than SGLang policies",
        near(table.value("200", FEATHER), 3800.0, "{:,.0f} tokens/s", "3800 toks/s"),
        f"{table.value('200', FEATHER) / best:.2f}× the best of lpm and sglang_fcfs. Batches of 500 on one prefix "
        f"would have {apart(FeatherLoad()):,.0f}",
    )
    table.says(
        "Together, these effects drive the steady increase in FEATHER's batch size and throughput",
        f"batch {told(own, '.0f')}",
        [*own.values()] == sorted(own.values()),
        "a round keeps batches apart that are of one prefix each: a fifth of those that run",
    )
    return table.drawn("FEATHER Fig. 5.3: decode tokens", shown=SERVED[:2], axis="decode tokens")


PREFIXES = (500, 1_000, 2_000, 5_000, 10_000)


@figure("feather-fig5.4", PAPER, "§5.2.4, Fig. 5.4", "throughput by prefix length")
def fig5_4(given: FigureInputs) -> Result:
    table = sweep(given, "prefix", {f"{tokens:,}": FeatherLoad(prefix_tokens=tokens) for tokens in PREFIXES}, SOME)
    gains = table.ratios()
    fall = {policy: [table.value(at, policy) for at in gains] for policy in SOME}
    table.says(
        "longer prefixes increase prefill compute and KV cache pressure, reducing throughput across policies",
        ", ".join(f"{policy} {each[0]:,.0f} to {each[-1]:,.0f}" for policy, each in fall.items()),
        all(each == sorted(each, reverse=True) for each in fall.values()),
        "tokens/s, shortest to longest; agrees if each step is down",
    )
    table.says(
        "FEATHER's advantage grows with prefix length, driven by higher locality gains as sequences lengthen",
        told(gains),
        [*gains.values()][-1] == max(gains.values()) and min(gains.values()) > 0.95,
        "feather over fcfs",
    )
    return table.drawn("FEATHER Fig. 5.4: prefix length", shown=SERVED[:1], axis="prefix tokens")


LEVELS = (1, 2, 3, 4)
OWN = (FCFS, "bandit", "q_learning", "heuristic")


@figure("feather-fig5.5", PAPER, "§5.2.7, Fig. 5.5", "throughput by tree levels")
def fig5_5(given: FigureInputs) -> Result:
    points = {
        f"{levels}": FeatherLoad(prefix_tokens=4_000, levels=levels, groups=1 << (levels - 1)) for levels in LEVELS
    }
    table = sweep(given, "levels", points, OWN)
    fcfs, own = ([table.value(at, policy) for at in points] for policy in (FCFS, FEATHER))
    table.says(
        "going from 1 to 2 or more levels of the radix tree reduces the locality in KV cache traversal and, "
        "hence, degrades throughput",
        f"fcfs {', '.join(f'{each:,.0f}' for each in fcfs)}",
        max(fcfs[1:]) < 0.9 * fcfs[0],
        "tokens/s with 1 to 4 levels",
    )
    table.says(
        "*FEATHER* actively preserves prefix homogeneity within batches, leading to stable throughput at all levels",
        f"{', '.join(f'{each:,.0f}' for each in own)}",
        min(own) > 0.8 * max(own),
        "tokens/s; agrees if within a fifth. With four levels a branch has an eighth of those that run, and its "
        "batches read the weights for 60 requests; it is never slower than fcfs",
    )
    return table.drawn("FEATHER Fig. 5.5: tree levels", shown=SERVED[:2])


MODELS = {
    "Qwen 0.5B": "rtx6000ada-qwen-0.5b",
    "Qwen 1.5B": "rtx6000ada-qwen-1.5b",
    "Qwen 8B": "rtx6000ada-qwen-8b",
    "Llama 3 8B": MACHINE,
    "LongChat 13B": "rtx6000ada-longchat-13b",
}


@figure("feather-fig5.6", PAPER, "§5.2.5, Fig. 5.6", "throughput by model")
def fig5_6(given: FigureInputs) -> Result:
    table = sweep(given, "model", dict.fromkeys(MODELS, FeatherLoad()), SOME, MODELS)
    gains = table.ratios()
    first = [table.value(model, FEATHER) for model in MODELS]
    ahead = {
        model: table.value(model, FEATHER) / max(table.value(model, policy) for policy in SOME if policy != FEATHER)
        for model in MODELS
    }
    table.says(
        "FEATHER outperforms all baselines across all models",
        told(ahead),
        all(ratio > 0.99 for model, ratio in ahead.items() if model != "Qwen 1.5B"),
        "against the best of the others; agrees if nowhere more than 1 % behind, but for Qwen 1.5B, which the "
        "paper excepts",
    )
    table.says(
        "FEATHER's relative throughput advantage over the baselines grows with model size",
        told(gains),
        gains["Qwen 0.5B"] <= gains["Qwen 1.5B"] <= min(gains["Qwen 8B"], gains["Llama 3 8B"]),
        "feather over fcfs, from 0.5B to the 8B models",
    )
    table.says(
        "smaller models achieve higher throughput owing to lower per-token compute costs",
        ", ".join(f"{model}: {each:,.0f}" for model, each in zip(MODELS, first, strict=True)),
        first[0] > first[1] > max(first[2:4]),
        "tokens/s of feather",
    )
    return table.drawn("FEATHER Fig. 5.6: models", shown=SERVED[:3])


LONG_GROUPS = (1, 2, 5, 20, 100)


@figure("feather-fig5.7", PAPER, "§5.2.6, Fig. 5.7", "LongChat 13B by prefix groups")
def fig5_7(given: FigureInputs) -> Result:
    loads = {f"{groups}": FeatherLoad(groups=groups) for groups in LONG_GROUPS}
    machines = dict.fromkeys(loads, MODELS["LongChat 13B"])
    table = sweep(given, "groups", loads, (FCFS, "bandit", "dynamic"), machines)
    gains = table.ratios()
    fcfs = {groups: table.value(str(groups), FCFS) for groups in LONG_GROUPS}
    batch = {groups: table.value(str(groups), FCFS, "batch") for groups in LONG_GROUPS}
    tbt = {groups: table.value(str(groups), FCFS, "tbt_ms") for groups in LONG_GROUPS}
    own = [table.value(at, FEATHER) for at in loads]
    table.finds(
        "At 100 prefix groups, it achieves up to $22\\times$ higher throughput than FCFS",
        near(gains["100"], 22.0, text="22×"),
        "1,000 requests are ten of each prefix: even those that wait together are a batch of ten, for which a "
        "prefix of 5,000 tokens is computed",
    )
    table.says(
        "there is a sharp drop in throughput when moving from 1 to 2 prefix groups, accompanied by an increase in TBT",
        f"to {fcfs[2] / fcfs[1]:.0%}, TBT {tbt[1]:,.0f} and {tbt[2]:,.0f} ms",
        fcfs[2] < 0.8 * fcfs[1] and tbt[2] > tbt[1],
        "of fcfs",
    )
    table.says(
        "The further decline from 2 to 5 prefix groups is driven by KV cache evictions, which is also reflected "
        "in the steep reduction in average batch size",
        f"{fcfs[2]:,.0f} to {fcfs[5]:,.0f} tokens/s, batch {batch[2]:.0f} to {batch[5]:.0f}",
        fcfs[5] < fcfs[2] and batch[5] < 0.7 * batch[2],
        "23,004 tokens of KV hold four prefixes",
    )
    table.says(
        "*FEATHER* maintains stable and consistent throughput across all settings",
        ", ".join(f"{each:,.0f}" for each in own),
        min(own) > 0.8 * max(own),
        "tokens/s; agrees if within a fifth",
    )
    return table.drawn("FEATHER Fig. 5.7: LongChat 13B", shown=SERVED[:3])
