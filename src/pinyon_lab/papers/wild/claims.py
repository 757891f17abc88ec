"""What "KVCache cache in the wild" says of Figs. 25 to 27 (§4.3), beside the rows of one of them.

The printed ranges are of the three figures together, so that what one of them has must lie inside. Percentages are
taken as points of hit ratio: those are in % themselves, and the steps of Fig. 28 add up as points. The text leaves it
open, so the relative ones stand beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from pinyon_lab.figures.figure import Claim, Rows, Section
from pinyon_lab.figures.rows import claimed, number, share

__all__ = ["BASELINES", "claims"]

SECTION = Section("§4.3")

BASELINES = ("lru", "fifo", "lfu", "s3fifo")
"""§4.3: "standard policies"; GDFS is in Fig. 28 only."""
WORST, BEST = (8.1, 23.9), (1.5, 3.9)
"""Printed, in %."""
FALLS_BACK = 0.005
"""Ours: this near to LRU is "essentially" LRU."""
CLOSE = 0.95
"""Ours: this share of Belady's is "close to optimal"."""


def claims(rows: Rows) -> list[Claim]:
    """Of rows by workload and ratio, in the order of the ratios; those with a CPU cache, but for one."""
    a, b = ([row for row in rows if row["workload"] == name] for name in ("qwen-a", "qwen-b"))
    return [
        _gain(
            "our policy WA achieves 8.1–23.9 % higher hit rate compared to other baselines",
            [row for row in a if row["ratio"]],
            ("over_worst", "worst"),
            WORST,
        ),
        _gain(
            "it has a 1.5–3.9 % higher hit rate compared to the best of other baselines",
            [row for row in a if row["ratio"]],
            ("over_best", "best"),
            BEST,
        ),
        _falls(a),
        _more_on_a(a, b),
        _falls_back(b),
        _close_to_optimal(b),
    ]


def _gain(said: str, rows: Rows, over: tuple[str, str], printed: tuple[float, float]) -> Claim:
    key, which = over
    points = [100 * number(row, key) for row in rows]
    relative = [100 * share(number(row, key), number(row, "workload_aware") - number(row, key)) for row in rows]
    low, high = printed
    return SECTION.says(
        said,
        f"{min(points):.1f} to {max(points):.1f} points",
        low <= round(min(points), 1) and round(max(points), 1) <= high,
        f"over the {which} of {', '.join(BASELINES)} on trace A (on B the text has WA fall back to LRU), by ratio: "
        f"{_listed(rows, points)}; relative, which the text may mean, {min(relative):.1f} to {max(relative):.1f} %; "
        "the printed range is of three figures, so that one of them should lie inside",
        printed=f"{low}–{high} %",
        basis=claimed(*rows),
    )


def _listed(rows: Rows, points: Sequence[float]) -> str:
    return ", ".join(f"{point:+.1f} ({row['ratio']:g})" for row, point in zip(rows, points, strict=True))


def _falls(a: Rows) -> Claim:
    with_cpu = [row for row in a if row["ratio"]]
    least, most = number(with_cpu[0], "over_best"), number(with_cpu[-1], "over_best")
    return SECTION.says(
        "the effectiveness of WA decreases when the cache capacity increases",
        f"{100 * least:+.1f} to {100 * most:+.1f} points",
        most < least,
        "over the best baseline on trace A, at the least and at the largest CPU cache",
        basis=claimed(*a),
    )


def _more_on_a(a: Rows, b: Rows) -> Claim:
    on_a, on_b = (100 * mean([number(row, "over_best") for row in of if row["ratio"]]) for of in (a, b))
    return SECTION.says(
        "WA is more effective on Trace A than Trace B",
        f"{on_a:+.1f} on A, {on_b:+.1f} points on B",
        on_a > on_b,
        "over the best baseline, mean of the ratios",
        basis=claimed(*a, *b),
    )


def _falls_back(b: Rows) -> Claim:
    apart = max(abs(number(row, "workload_aware") - number(row, "lru")) for row in b)
    return SECTION.says(
        "our fitted exponential distribution-based policy essentially falls back to a normal LRU",
        f"{100 * apart:.2f} points from LRU at most",
        apart <= FALLS_BACK,
        "on trace B, which has one category",
        basis=claimed(*b),
    )


def _close_to_optimal(b: Rows) -> Claim:
    (alone,) = (row for row in b if not row["ratio"])
    of_belady = {policy: share(number(alone, policy), number(alone, "belady")) for policy in BASELINES}
    lfu = of_belady.pop("lfu")
    return SECTION.says(
        "GPU HBM is already close to optimal except for LFU",
        f"{min(of_belady.values()):.1%} of Belady's hits at least, LFU {lfu:.1%}",
        lfu < CLOSE <= min(of_belady.values()),
        f'on trace B without a CPU cache; "close" taken as {CLOSE:.0%}',
        basis=claimed(alone),
    )
