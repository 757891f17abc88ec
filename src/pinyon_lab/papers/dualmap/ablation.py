"""DualMap §4.3, Fig. 5: what each of its parts brings."""

from __future__ import annotations

from collections.abc import Sequence

from pinyon_lab.figures.figure import Basis, Claim, Column, Result, Section, Tell, Value, figure
from pinyon_lab.figures.rows import basis, close, number
from pinyon_lab.figures.workload import Workload
from pinyon_lab.papers.dualmap.runs import DECODING, DUALMAP, MODEL_NOTE, PAPER, SEEDS_NOTE, all_seeds, load_of, means
from pinyon_lab.pictures import Bars, Picture

VARIANTS = {
    "cache affinity": "dualmap:choice=cache_affinity,rebalance=false",
    "least loaded": "dualmap:choice=least_loaded,rebalance=false",
    "min TTFT": "dualmap:choice=min_ttft,rebalance=false",
    "no rebalance": "dualmap:rebalance=false",
    "DualMap": DUALMAP,
}
ABLATION_RATE = 3.5
"""Conversation on the 14B model; the text names none."""


@figure("dualmap-fig5", PAPER, "§4.3, Fig. 5", "what each part brings", ("conversation",))
def fig5(workloads: Sequence[Workload], tell: Tell) -> Result:
    (workload,) = workloads
    load = load_of(workload, "14B")
    rows: list[dict[str, Value]] = []
    for label, policy in VARIANTS.items():
        runs = all_seeds(load, DECODING, policy, ABLATION_RATE, tell)
        rows.append(
            {"variant": label, **means(runs, "p50_s", "p90_s", "hits", "cv", "attainment"), "basis": basis(workload)}
        )
    by = {str(row["variant"]): row for row in rows}

    def less(key: str, variant: str, than: str) -> float:
        return 1 - number(by[variant], key) / number(by[than], key)

    section = Section("§4.3")

    def claim(said: str, printed: float, ours: float) -> Claim:
        agrees = close(ours, printed)
        return section.says(said, f"{ours:.1%}", agrees, f"at {ABLATION_RATE}/s", printed=f"{printed:.1%}")

    p50, p90 = (number(by["cache affinity"], key) for key in ("p50_s", "p90_s"))
    claims = [
        section.says(
            "*DualMap-cache-affinity* shows the highest P50 (Figure 5a) and P90 (Figure 5b) TTFT",
            f"P50 {p50:.2f} s, P90 {p90:.2f} s",
            all(number(row, "p50_s") <= p50 and number(row, "p90_s") <= p90 for row in rows),
        ),
        claim(
            "*DualMap-no-rebalance* performs better, reducing P50 and P90 TTFT by 23.5% and 18.5%",
            0.235,
            less("p50_s", "no rebalance", "min TTFT"),
        ),
        claim("reducing P50 and P90 TTFT by 23.5% and 18.5%", 0.185, less("p90_s", "no rebalance", "min TTFT")),
        claim(
            "further reducing P90 TTFT by 11.3% with hotspot-aware rebalancing",
            0.113,
            less("p90_s", "DualMap", "no rebalance"),
        ),
    ]
    columns = [
        Column("variant", "of the pair takes"),
        Column("p50_s", "TTFT P50, s", ".2f", Basis.MODELLED),
        Column("p90_s", "P90", ".2f", Basis.MODELLED),
        Column("hits", "reused", ".1%", Basis.MODELLED),
        Column("cv", "CV", ".2f", Basis.MODELLED),
        Column("attainment", "in time", ".1%", Basis.MODELLED),
    ]
    groups = list(VARIANTS)
    panels = [
        Bars(
            "TTFT",
            "seconds",
            groups,
            {key: [number(by[each], f"{key.lower()}_s") for each in groups] for key in ("P50", "P90")},
            ".1f",
        ),
        Bars("Reused", "of the tokens", groups, {"hits": [number(by[each], "hits") for each in groups]}),
    ]
    return Result(columns, rows, claims, [MODEL_NOTE, SEEDS_NOTE], Picture("DualMap Fig. 5: ablation", panels))
