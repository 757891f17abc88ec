"""Figs. 25 to 27 of "KVCache cache in the wild" (§4.3): hit ratio over the CPU cache beside the GPU, three models."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

from pinyon_lab.caches.lru_curve import LruCurve
from pinyon_lab.caches.replay import BELADY, replay
from pinyon_lab.figures.figure import Basis, Column, Figure, Result, Rows, Tell, Value
from pinyon_lab.figures.rows import basis, counting, number, share, shown
from pinyon_lab.figures.testbed import capacity_blocks, served
from pinyon_lab.figures.workload import Workload
from pinyon_lab.papers.wild.claims import BASELINES, claims
from pinyon_lab.pictures import Course, Courses, Picture
from pinyon_lab.traces.analysis.models import KV_HBM_FORMULA, MODELS, Served

__all__ = ["BY_RATIO", "PAPER", "SEED", "TESTBED_NOTES"]

PAPER = 'KVCache cache "in the wild" (ATC \'25)'
RATIOS = (0.0, 1.0, 2.0, 4.0)
"""Ours: the paper's are in its pictures only. 0: the GPU alone, of which the text speaks, too."""
SHORT = {
    **{name: name for name in ("lru", "fifo", "lfu", "s3fifo", "gdfs", "sieve")},
    "workload_aware": "WA",
    "reuse_hazard": "own",
    BELADY: BELADY,
}
"""Policies, the paper's name for its own (WA), and what heads their columns."""
SEED = 1
"""Of the drawing of users."""

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


def _by_ratio(model: Served, workloads: Sequence[Workload], tell: Tell) -> Result:
    rows = [row for workload in workloads for row in _rows(model, workload, tell)]
    columns = [
        Column("workload", "workload"),
        Column("ratio", "CPU", "g"),
        *(Column(policy, short, ".1%", Basis.MEASURED) for policy, short in SHORT.items()),
        Column("ideal", "ideal", ".1%", Basis.MEASURED),
        Column("over_best", "WA-best", "+.1%", Basis.MEASURED),
    ]
    notes = [
        f"{model.name}, {model.gpus} × A800-80GB. CPU: its cache, × the HBM for KV; 0 is the GPU alone. The ratios are "
        f"ours. WA-best: points of hit ratio above the best of {', '.join(BASELINES)}, the paper's baselines. own: "
        "reuse_hazard. ideal: no end of room.",
        *TESTBED_NOTES,
    ]
    return Result(columns, rows, claims(rows), notes, _picture(model, workloads, rows))


def _rows(model: Served, workload: Workload, tell: Tell) -> list[dict[str, Value]]:
    tell(f"{workload.name}: what one instance of {model.name} serves, LRU at every capacity")
    part = served(workload, model, random.Random(SEED))
    requests = part.asked()
    curve = LruCurve([asked.blocks for asked in requests])
    rows: list[dict[str, Value]] = []
    for ratio in RATIOS:
        capacity = max(1, capacity_blocks(model, part.block_tokens, ratio))
        row: dict[str, Value] = {"workload": part.name, "ratio": ratio, "capacity_blocks": capacity}
        row |= {"requests": len(requests), "basis": basis(part), "lru": share(curve.hits(capacity), curve.blocks)}
        for policy in SHORT:
            if policy != "lru":
                heard = counting(tell, f"{part.name}, CPU cache {ratio:g} × HBM: {policy}", len(requests))
                row[policy] = share(replay(requests, policy, capacity, heard).hit_blocks, curve.blocks)
        others = [number(row, policy) for policy in BASELINES]
        row |= {"ideal": share(curve.ideal_hits, curve.blocks)}
        row |= {"over_best": number(row, "workload_aware") - max(others)}
        row |= {"over_worst": number(row, "workload_aware") - min(others)}
        rows.append(row)
    return rows


def _picture(model: Served, workloads: Sequence[Workload], rows: Rows) -> Picture:
    panels = []
    for workload in workloads:
        own = [row for row in rows if row["workload"] == workload.name]
        courses = [
            Course(policy, [(1 + number(row, "ratio"), number(row, policy)) for row in own], policy == BELADY)
            for policy in SHORT
        ]
        x_label = "HBM for KV and CPU cache, × HBM for KV"
        panels.append(Courses(shown(workload), x_label, "blocks that hit", courses))
    return Picture(f"Hit ratio over capacity: {model.name}, {model.gpus} × A800-80GB", panels)


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
