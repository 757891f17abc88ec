"""Figs. 25 to 28 of "KVCache cache in the wild" (§4.3): hit ratio by size of the CPU cache, for three models.

Queued TTFT is the gain by more hits when prompts wait. Fig. 28 is the gain by each technique of Table 2, for Qwen2-7B
and a CPU cache of the HBM's size.

Techniques: ① fitted distributions, ② a prompt's head outlives its end, ③ the expected lifespan. §4.3 gives ② to all.

A model of one serving instance says how many blocks its cache holds, and which part of a trace it serves. The paper
scales its traces "to fit the processing capability" of the testbed and prints neither the factor nor that capability.
Its §3.5 gives a hint, for Qwen2-7B and trace A: "suppose a GPU can process 5 requests per second". The tokens of these
requests, without those that an ideal cache would have, are what one GPU computes in a second. Other models compute
fewer tokens, in inverse proportion to the parameters per GPU that they multiply with. As a check, 2 FLOP per parameter
and token make that 96 TFLOPS, a third of an A800's 312 (Mooncake, Table 1)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import compress
from statistics import mean
from typing import Any

from pinyon.eviction.interface import EvictionPolicy, Traits
from pinyon.eviction.workload_aware import WorkloadAwareSettings
from pinyon_lab.caches.cache import Cache, leading_run
from pinyon_lab.caches.lru_curve import LruCurve
from pinyon_lab.caches.replay import BELADY, CacheReplay, replay, replayed
from pinyon_lab.figures.figure import Basis, Column, Figure, FigureInputs, Result, RowList, Table, Tell, columns, figure
from pinyon_lab.figures.rows import claimed, counting, near, share
from pinyon_lab.figures.workload import Workload
from pinyon_lab.pictures import Bars, Course, Courses, Mark, Panel
from pinyon_lab.simulator.models import ReferenceModel
from pinyon_lab.simulator.prefill_reference import ReferenceSettings
from pinyon_lab.simulator.workload import cut
from pinyon_lab.traces import TraceRow
from pinyon_lab.traces.analysis.models import KV_HBM_FORMULA, MODELS, ServingModel
from pinyon_lab.traces.scaling import Unit, chosen

HOUR_S = 3600.0
"""The part of a longer trace that counts: its first hour, as Fig. 22 takes one."""
REFERENCE = MODELS[0]
REQUESTS_PER_S = 5
"""The request rate of the reference model (§3.5)."""
SINGLE_TOKENS, MULTI_TOKENS, MULTI_SHARE = 973, 5953, 0.47
"""The mean tokens, prompt and answer, of single- and multi-turn requests, and the multi-turn share (§3.5)."""
IDEAL = 0.62
"""The ideal hit ratio of trace A (§3.2, Fig. 4)."""
REFERENCE_PER_S = (
    REQUESTS_PER_S * (SINGLE_TOKENS * (1 - MULTI_SHARE) + MULTI_TOKENS * MULTI_SHARE) * (1 - IDEAL) / REFERENCE.gpus
)


def capacity_blocks(model: ServingModel, block_tokens: int, ratio: float) -> int:
    """Returns the blocks that fit in the HBM for KV and a CPU cache of ``ratio`` times that size.

    Both count, because a block is in one of the two. A block without room on the GPU goes to the CPU, and a block
    without room there is removed (§4.1)."""
    return int(model.kv_hbm_bytes * (1 + ratio) / (model.token_bytes * block_tokens))


def computed_per_s(model: ServingModel) -> float:
    """Returns the number of tokens that an instance computes in a second."""
    return REFERENCE_PER_S * model.gpus * REFERENCE.parameters / model.parameters


def served(workload: Workload, model: ServingModel, generator: random.Random) -> Workload:
    """Returns the part of a workload that one instance serves: as many users as it can, at their own times.

    If no users are named, sessions are drawn. If neither is named, all requests stay: requests drawn one by one would
    not find the blocks that they reuse."""
    end_s = workload.rows[0].time_s + HOUR_S
    rows = [row for row in workload.rows if row.time_s < end_s]
    unit: Unit | None = "user" if rows[0].user else "session" if rows[0].chat else None
    asked, most = _asked_per_s(rows, workload.block_tokens), computed_per_s(model)
    if unit is not None and asked > most:
        rows = list(compress(rows, chosen(rows, unit, most / asked, generator)))
    return replace(workload, rows=rows)


def _asked_per_s(rows: Sequence[TraceRow], block_tokens: int) -> float:
    """Returns the tokens to compute in a second, prompts and answers, if nothing is ever evicted."""
    seen: set[int] = set()
    tokens = 0
    for row in rows:
        tokens += max(0, row.input_tokens - leading_run(row.blocks, seen) * block_tokens) + row.output_tokens
        seen.update(row.blocks)
    return tokens / max(1.0, rows[-1].time_s - rows[0].time_s)


BASELINES = ("lru", "fifo", "lfu", "s3fifo")
"""The "standard policies" of §4.3; GDFS is in Fig. 28 only."""
WORST, BEST = (8.1, 23.9), (1.5, 3.9)
"""The printed gains over the worst and over the best baseline, in %."""
FALLS_BACK = 0.005
"""Our choice: a policy within this distance of LRU "essentially" is LRU."""
CLOSE = 0.95
"""Our choice: this share of Belady's hits is "close to optimal"."""


def add_claims(table: Table) -> None:
    """Adds the claims about the rows by workload and ratio, in the order of the ratios.

    Most claims are about rows with a CPU cache. A printed range is for three figures together, so the range of one must
    lie inside it. Percentages are taken as points of hit ratio: hit ratios are in % themselves, and the steps of Fig.
    28 add up as points. The text leaves it open, so the relative gains stand beside the points."""
    a, b = (table.rows.those(workload=name) for name in ("qwen-a", "qwen-b"))
    a_with_cpu = RowList(row for row in a if row["ratio"])
    over_best = a_with_cpu.column("over_best")
    on_a, on_b = (100 * mean([row["over_best"] for row in of if row["ratio"]]) for of in (a, b))
    apart = max(abs(row["workload_aware"] - row["lru"]) for row in b)
    (alone,) = (row for row in b if not row["ratio"])
    of_belady = {policy: share(alone[policy], alone["belady"]) for policy in BASELINES}
    lfu = of_belady.pop("lfu")
    _gain(
        table,
        "our policy WA achieves 8.1–23.9 % higher hit rate compared to other baselines",
        a_with_cpu,
        "worst",
        WORST,
    )
    _gain(table, "it has a 1.5–3.9 % higher hit rate compared to the best of other baselines", a_with_cpu, "best", BEST)
    table.says(
        "the effectiveness of WA decreases when the cache capacity increases",
        f"{100 * over_best[0]:+.1f} to {100 * over_best[-1]:+.1f} points",
        over_best[-1] < over_best[0],
        "over the best baseline on trace A, at the least and at the largest CPU cache",
        basis=claimed(*a),
    )
    table.says(
        "WA is more effective on Trace A than Trace B",
        f"{on_a:+.1f} on A, {on_b:+.1f} points on B",
        on_a > on_b,
        "over the best baseline, mean of the ratios",
        basis=claimed(*a, *b),
    )
    table.says(
        "our fitted exponential distribution-based policy essentially falls back to a normal LRU",
        f"{100 * apart:.2f} points from LRU at most",
        apart <= FALLS_BACK,
        "on trace B, which has one category",
        basis=claimed(*b),
    )
    table.says(
        "GPU HBM is already close to optimal except for LFU",
        f"{min(of_belady.values()):.1%} of Belady's hits at least, LFU {lfu:.1%}",
        lfu < CLOSE <= min(of_belady.values()),
        f'on trace B without a CPU cache; "close" taken as {CLOSE:.0%}',
        basis=claimed(alone),
    )


def _gain(table: Table, said: str, rows: RowList, which: str, printed: tuple[float, float]) -> None:
    key = f"over_{which}"
    points = [100 * row[key] for row in rows]
    relative = [100 * share(row[key], row["workload_aware"] - row[key]) for row in rows]
    listed = ", ".join(f"{point:+.1f} ({row['ratio']:g})" for row, point in zip(rows, points, strict=True))
    low, high = printed
    table.says(
        said,
        f"{min(points):.1f} to {max(points):.1f} points",
        low <= round(min(points), 1) and round(max(points), 1) <= high,
        f"over the {which} of {', '.join(BASELINES)} on trace A (on B the text has WA fall back to LRU), by ratio: "
        f"{listed}; relative, which the text may mean, {min(relative):.1f} to {max(relative):.1f} %; "
        "the printed range is of three figures, so that one of them should lie inside",
        printed=f"{low}–{high} %",
        basis=claimed(*rows),
    )


PAPER = 'KVCache cache "in the wild" (ATC \'25)'
RATIOS = (0.0, 1.0, 2.0, 4.0)
"""Our choice: the paper's ratios are in its pictures only. 0 is the GPU alone, of which the text speaks, too."""
SHORT = {
    **{name: name for name in ("lru", "fifo", "lfu", "s3fifo", "gdfs", "sieve")},
    "workload_aware": "WA",
    "reuse_hazard": "own",
    BELADY: BELADY,
}
"""The heading of each policy's column; WA is the paper's name for its own policy."""
SEED = 1
"""The seed with which users are drawn."""

TESTBED_NOTES = (
    "Capacity: (1 + ratio) × HBM for KV / bytes of a block, as a block is either in the GPU or, evicted from there, in "
    f"the CPU's cache (§4.1). {KV_HBM_FORMULA}",
    "Load (modelled): the paper does not print by how much it scaled its traces. Here one instance gets the first hour "
    "of as many users (sessions, where no users are named), at their own times, as it can compute: what 5 requests/s "
    "of 973 or 5,953 tokens leave Qwen2-7B to compute at 62 % hits (§3.5, Fig. 4), and fewer by parameters per GPU. "
    "Traces that name neither users nor sessions are whole.",
    "Service takes no time, and answers are not cached before they come back in a prompt. For QTTFT, which needs "
    "queues, see `pinyon reproduce wild-qttft`.",
)


def _by_ratio(model: ServingModel, given: FigureInputs) -> Result:
    table = Table(
        given,
        *columns(workload="workload", ratio=("CPU", "g")),
        *(Column(policy, short, ".1%", Basis.MEASURED) for policy, short in SHORT.items()),
        *columns(Basis.MEASURED, ideal=("ideal", ".1%"), over_best=("WA-best", "+.1%")),
    )
    panels = []
    for workload in given.workloads:
        given.tell(f"{workload.name}: what one instance of {model.name} serves, LRU at every capacity")
        part = served(workload, model, random.Random(SEED))
        requests = part.asked()
        curve = LruCurve([asked.blocks for asked in requests])
        for ratio in RATIOS:
            capacity = max(1, capacity_blocks(model, part.block_tokens, ratio))
            hits = {"lru": share(curve.hits(capacity), curve.blocks)}
            for policy in SHORT:
                if policy != "lru":
                    heard = counting(given.tell, f"{part.name}, CPU cache {ratio:g} × HBM: {policy}", len(requests))
                    hits[policy] = share(replay(requests, policy, capacity, heard).hit_blocks, curve.blocks)
            own, others = hits["workload_aware"], [hits[policy] for policy in BASELINES]
            values = *hits.values(), share(curve.ideal_hits, curve.blocks), own - max(others)
            more = {"over_worst": own - min(others), "capacity_blocks": capacity, "requests": len(requests)}
            table.add(part.name, ratio, *values, **more, basis=part.basis)
        rows = table.rows.those(workload=part.name)
        courses = [
            Course(policy, [(1 + x, y) for x, y in rows.points("ratio", policy)], policy == BELADY) for policy in SHORT
        ]
        x_label = "HBM for KV and CPU cache, × HBM for KV"
        panels.append(Courses(workload.shown, x_label, "blocks that hit", courses))
    notes = [
        f"{model.name}, {model.gpus} × A800-80GB. CPU: its cache, × the HBM for KV; 0 is the GPU alone. The ratios are "
        f"ours. WA-best: points of hit ratio above the best of {', '.join(BASELINES)}, the paper's baselines. own: "
        "reuse_hazard. ideal: no end of room.",
        *TESTBED_NOTES,
    ]
    title = f"Hit ratio over capacity: {model.name}, {model.gpus} × A800-80GB"
    add_claims(table)
    return table.result(title, panels, notes)


BY_RATIO = tuple(
    Figure(
        f"wild-fig{25 + place}",
        PAPER,
        f"§4.3, Fig. {25 + place}",
        f"hit ratio over CPU cache / HBM, {model.name}",
        ("qwen-a", "qwen-b"),
        ("conversation", "synthetic", "claude-code"),
        partial(_by_ratio, model),
    )
    for place, model in enumerate(MODELS)
)


QUEUED_RATIOS = (1.0, 2.0)
"""Our choice: the paper's ratios are in its pictures only."""
POLICIES = (*BASELINES, "workload_aware", "reuse_hazard")
PRINTED = (0.283, 0.419)


def _mean_s(workload: Workload, model: ServingModel, ratio: float, policy: str, tell: Tell) -> float:
    block_tokens = workload.block_tokens
    settings = ReferenceSettings(
        1,
        max(1, capacity_blocks(model, block_tokens, ratio)) * block_tokens,
        block_tokens,
        eviction=policy,
        token_us=1e6 / computed_per_s(model),
    )
    arrivals = cut(workload.rows, block_tokens, 1 << 40)
    text = f"{workload.name}, {model.name}, CPU cache {ratio:g} × HBM: {policy}"
    tell(text)
    rows = ReferenceModel(settings, "least_loaded", "fifo").run(arrivals, counting(tell, text, len(arrivals)))
    return float(sum(row.ttft_s for row in rows) / len(rows))


@figure("wild-qttft", PAPER, "§4.3, Figs. 25 to 27", "queued TTFT", ("qwen-a", "qwen-b"))
def qttft(given: FigureInputs) -> Result:
    table = Table(
        given,
        *columns(model="model", workload="workload", ratio=("CPU", "g")),
        *(Column(policy, SHORT[policy], ".2f", Basis.MODELLED) for policy in POLICIES),
        *columns(Basis.MODELLED, to_best=("WA to best", "-.1%"), to_worst=("to worst", "-.1%")),
        *columns(Basis.MODELLED, own_to_best=("own to best", "-.1%")),
    )
    for model in MODELS:
        for workload in given.workloads:
            part = served(workload, model, random.Random(SEED))
            for ratio in QUEUED_RATIOS:
                means = {policy: _mean_s(part, model, ratio, policy, given.tell) for policy in POLICIES}
                baselines = [means[policy] for policy in BASELINES]
                best, worst, aware = min(baselines), max(baselines), means["workload_aware"]
                gains = 1 - aware / best, 1 - aware / worst, 1 - means["reuse_hazard"] / best
                table.add(model.name, part.name, ratio, *means.values(), *gains, basis=part.basis)
    notes = [
        "Mean seconds from arrival to the first token at one instance that computes one prompt after the other, as "
        "many tokens in a second as it is taken to compute; answers take none of its time. WA is the paper's policy, "
        "own is reuse_hazard; to best, to worst: how much less than the best and the worst of "
        f"{', '.join(BASELINES)}. How long queues are depends on the load, of which the paper prints nothing.",
        *TESTBED_NOTES[:2],
    ]
    panels = []
    for name in dict.fromkeys(str(row["workload"]) for row in table.rows):
        rows = table.rows.those(workload=name, ratio=1.0)
        values = {SHORT[policy]: rows.column(policy) for policy in POLICIES}
        panels.append(
            Bars(f"{name}, CPU cache 1 × HBM", "mean QTTFT, s", [str(row["model"]) for row in rows], values, ".1f")
        )
    on_a = table.rows.those(workload="qwen-a")
    to_best, to_worst = (on_a.column(key) for key in ("to_best", "to_worst"))
    low, high = PRINTED
    table.says(
        "WA achieves 28.3–41.9% QT-TFT reduction thanks to the improved KV\\$ cache hit rate",
        f"{min(to_best):.1%} to {max(to_best):.1%} to the best, {min(to_worst):.1%} to {max(to_worst):.1%} to the "
        "worst baseline",
        min(to_worst) >= 0.8 * low and min(to_best) <= 1.2 * high,
        "on trace A; the text does not say against which baseline: agrees if the printed range is between the two",
        printed=f"{100 * low:.1f}–{high:.1%}",
        basis=Basis.CONSTRUCTION,
    )
    return table.result("Queued TTFT by eviction policy", panels, notes)


MODEL = MODELS[0]
ABLATED_RATIO = 1.0
LIFE_S = WorkloadAwareSettings().life_s
"""The default life, in seconds."""
LIVES_S = (10, 30, LIFE_S, 300, 600)
"""Our choice: the paper does not say what life is."""
ABLATED = ("lru", "fifo", "lfu", "s3fifo", "sieve", "gdfs")
NEITHER = "workload_aware:fitted=false,life_s=0"
FITTED = "workload_aware:life_s=0"
WHOLE = "workload_aware"
LABELS = {**{name: name for name in ABLATED}, NEITHER: "WA without ① ③", FITTED: "WA ①", WHOLE: "WA ① ③"}
SWEEP = {LABELS[WHOLE] if life == LIFE_S else f"workload_aware:life_s={life:g}": life for life in LIVES_S}
"""The life of each policy, by the policy's name in the rows."""


class HeadFirst:
    """A cache like :class:`CacheReplay`, but without ②. Its policy is told of blocks one by one from a prompt's start,
    without their places in it: of equally good blocks, it evicts the prompt's head first."""

    def __init__(self, policy: EvictionPolicy[int], capacity: int) -> None:
        self._cache = Cache(policy, capacity)

    def request(self, blocks: Sequence[int], now_s: float, traits: Traits) -> int:
        """Plays one request, and returns how many of its blocks were hits."""
        hits = leading_run(blocks, self._cache.resident)
        for block in dict.fromkeys(blocks):
            self._cache.tell((block,), (0,), now_s, traits)
        self._cache.shrink(now_s)
        return hits


@figure("wild-fig28", PAPER, "§4.3, Fig. 28", f"what each technique gives, {MODEL.name}, CPU cache = HBM", ("qwen-a",))
def fig28(given: FigureInputs) -> Result:
    (workload,) = given.workloads
    part = served(workload, MODEL, random.Random(SEED))
    requests = part.asked()
    capacity = max(1, capacity_blocks(MODEL, part.block_tokens, ABLATED_RATIO))
    blocks = sum(len(asked.blocks) for asked in requests)

    def hit_ratio(choice: str, cache: type[CacheReplay | HeadFirst]) -> float:
        without = ", without ②" * (cache is HeadFirst)
        heard = counting(given.tell, f"{choice}{without}", len(requests))
        return share(sum(replayed(requests, choice, lambda make: cache(make(), capacity), heard)[1]), blocks)

    table = Table(
        given,
        Column("policy", "policy"),
        *columns(Basis.MEASURED, hit_ratio=("hits", ".1%"), over_gdfs=("over gdfs", "+.1%")),
        *columns(Basis.MEASURED, without_offset=("without ②", ".1%"), offset_gives=("② gives", "+.1%")),
    )
    choices = (*LABELS, *(each for each in SWEEP if each != LABELS[WHOLE]), BELADY)
    ratios = {choice: hit_ratio(choice, CacheReplay) for choice in choices}
    for choice, ratio in ratios.items():
        plain = hit_ratio(choice, HeadFirst) if choice in LABELS else None
        gives = plain, None if plain is None else ratio - plain
        values = ratio, ratio - ratios["gdfs"], *gives
        sizes = {"capacity_blocks": capacity, "requests": len(requests)}
        table.add(LABELS.get(choice, choice), *values, **sizes, workload=part.name, basis=part.basis)
    notes = [
        f"{MODEL.name}, CPU cache = HBM for KV, trace A. ① fitted distributions, ② the head of a prompt before its "
        "end, ③ life (Table 2). Without ① and ③ only the time since the last use decides.",
        "② in the replays (it is applied to all policies, §4.3): lru, fifo, sieve and s3fifo hear of the end of a "
        "prompt first, so that of one request it goes first; lfu and gdfs have it as the second key, before the time "
        "of the last use; so does workload_aware, as published. Without ②: told from the head on, without places.",
        *TESTBED_NOTES,
    ]
    title = f"Fig. 28: {MODEL.name}, CPU cache = HBM for KV, {part.shown}"
    add_ablation_claims(table)
    return table.result(title, _panels(table.rows), notes)


def _of(rows: RowList, policy: str) -> dict[str, Any]:
    return rows.those(policy=policy)[0]


def add_ablation_claims(table: Table) -> None:
    rows = table.rows
    gdfs, lru, fitted, whole = (_of(rows, LABELS[each]) for each in ("gdfs", "lru", FITTED, WHOLE))
    first = 100 * fitted["over_gdfs"]
    over_lru = 100 * (fitted["hit_ratio"] - lru["hit_ratio"])
    second = 100 * (whole["hit_ratio"] - fitted["hit_ratio"])
    best = max((_of(rows, choice) for choice in SWEEP), key=lambda row: row["hit_ratio"])
    with_best = 100 * (best["hit_ratio"] - fitted["hit_ratio"])
    table.finds(
        "using a distribution-based approach improves the hit rate by 1%",
        near(first, 1, "{:+.1f} points", "1 %"),
        f"① without ③ over gdfs, both with ②; {over_lru:+.1f} over lru. The text does not say over what, nor "
        "whether frequency, which ③ removes, is still in ① there",
        basis=claimed(gdfs, fitted),
    )
    table.finds(
        "with the life regulator further increases the hit rate by 2.4 %",
        near(second, 2.4, "{:+.1f} points", "2.4 %"),
        f"③ with life {LIFE_S:g} s, the default; {with_best:+.1f} with the best one tried, "
        f"{SWEEP[str(best['policy'])]:g} s. The paper does not print its own",
        basis=claimed(fitted, whole),
    )


def _panels(rows: RowList) -> list[Panel]:
    labels = [label for choice, label in LABELS.items() if choice != NEITHER]  # without ① and ③ it is lru
    both = RowList(_of(rows, label) for label in labels)
    bars: dict[str, Sequence[float | None]] = {
        "with ②": both.column("hit_ratio"),
        "without ②": both.column("without_offset"),
    }
    by_life = [(life, _of(rows, choice)["hit_ratio"]) for choice, life in SWEEP.items()]
    ends = by_life[0][0], by_life[-1][0]
    flat = [
        Course(label, [(x, _of(rows, label)["hit_ratio"]) for x in ends], dashed=True)
        for label in ("lru", "gdfs", LABELS[FITTED], BELADY)
    ]
    courses, default = [Course("WA ① ③ by life", by_life), *flat], Mark(f"{LIFE_S:g} s: the default", LIFE_S)
    return [
        Bars("Policies", "blocks that hit", labels, bars),
        Courses("Life", "life, s", "blocks that hit", courses, (default,)),
    ]
