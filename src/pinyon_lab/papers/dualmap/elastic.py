"""DualMap when clusters grow: added and removed while they serve (A.3.3, Fig. 12), and from 8 to 32 instances (A.4.1,
Fig. 13); prompts and decoding on instances of their own (A.6)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pinyon.core.errors import InvalidArgument
from pinyon.core.request import Role
from pinyon.placement.scaling import ScalingSettings
from pinyon_lab.figures.figure import Basis, Claim, Column, Result, Rows, Section, Tell, Value, figure
from pinyon_lab.figures.rows import basis, close, number, shown
from pinyon_lab.figures.workload import Workload
from pinyon_lab.papers.dualmap.runs import (
    DECODING,
    DUALMAP,
    MODEL_NOTE,
    ONE_SEED_NOTE,
    PAPER,
    POLICIES,
    PREFILL_ONLY,
    SEEDS_NOTE,
    SLO_S,
    WARM_UP,
    System,
    all_seeds,
    cluster_of,
    goodput,
    label,
    load_of,
    mean,
)
from pinyon_lab.pictures import Bars, Course, Courses, Mark, Picture
from pinyon_lab.simulator.outcome import Outcome
from pinyon_lab.simulator.report import cluster_report
from pinyon_lab.simulator.workload import Arrival, at_rate

# -- Fig. 12

FEW, MANY = 4, 8
BUSY, CALM = 1.6, 0.5
"""Of what four instances serve at 90 %: the rate under which they grow, and that under which eight shrink."""
KNEE = 7.0
"""Requests/s that four of the modelled instances serve in time on the tool&agent workload."""
WINDOW_S = 30.0
CALM_S = 2_000.0


def _phase(arrivals: Sequence[Arrival], rate: float, start_s: float, end_s: float) -> list[Arrival]:
    sent = at_rate(arrivals, rate)
    return [each._replace(time_s=each.time_s + start_s) for each in sent if each.time_s < end_s - start_s]


def _by_window(outcomes: Sequence[Outcome]) -> list[tuple[float, float]]:
    """End of each window, and who of those that came in it was in time."""
    windows: dict[int, list[bool]] = {}
    for each in outcomes:
        windows.setdefault(int(each.arrived_s / WINDOW_S), []).append(0 <= each.ttft_s <= SLO_S)
    return [((at + 1) * WINDOW_S, sum(seen) / len(seen)) for at, seen in sorted(windows.items())]


@figure("dualmap-fig12", PAPER, "§A.3.3, Fig. 12", "scaling", ("toolagent",))
def fig12(workloads: Sequence[Workload], tell: Tell) -> Result:
    (workload,) = workloads
    load = load_of(workload, "7B")
    half = len(load.arrivals) // 2
    busy_end_s = half / (BUSY * KNEE)
    arrivals = _phase(load.arrivals[:half], BUSY * KNEE, 0.0, busy_end_s)
    arrivals += _phase(load.arrivals[half:], CALM * KNEE, busy_end_s, busy_end_s + CALM_S)
    rows: list[dict[str, Value]] = []
    panels, told = [], {}
    for text, scaling in (("scaling", ScalingSettings(FEW, MANY, SLO_S)), (f"{FEW} instances", None)):
        tell(f"{workload.name}: {text}")
        cluster = cluster_of(load, System(DECODING, DUALMAP, FEW), scaling=scaling)
        windows = _by_window(cluster.run(arrivals))
        sizes = cluster.elasticity.sizes if cluster.elasticity is not None else [(0.0, FEW)]
        told[text] = windows, sizes
        for name, start_s, end_s in (("busy", 0.0, busy_end_s), ("calm", busy_end_s, busy_end_s + CALM_S)):
            inside = [share for at_s, share in windows if start_s < at_s <= end_s]
            rows.append(
                {
                    "cluster": text,
                    "phase": name,
                    "rate": (BUSY if name == "busy" else CALM) * KNEE,
                    "attainment": sum(inside) / max(1, len(inside)),
                    "later": sum(inside[len(inside) // 2 :]) / max(1, len(inside) - len(inside) // 2),
                    "least": min((size for at_s, size in sizes if start_s < at_s <= end_s), default=sizes[-1][1]),
                    "most": max((size for at_s, size in sizes if start_s < at_s <= end_s), default=sizes[-1][1]),
                    "basis": basis(workload),
                }
            )
    windows, sizes = told["scaling"]
    grown_s = next((at_s for at_s, size in sizes if size > FEW), None)
    shrunk = [at_s for (at_s, size), (_, before) in zip(sizes[1:], sizes, strict=False) if size < before]
    busy, calm = (row for row in rows if row["cluster"] == "scaling")
    fixed = next(row for row in rows if row["cluster"] != "scaling" and row["phase"] == "busy")
    section = Section("§A.3.3")
    claims = [
        section.says(
            "At 74 seconds, *DualMap* detects overload",
            "never" if grown_s is None else f"{grown_s:.0f}",
            grown_s is not None and close(grown_s, 74),
            "seconds from the beginning; when depends on the rule, of which the text prints nothing, and on the rate",
            printed=74,
        ),
        section.says(
            "At 1809 seconds, *DualMap* begins gradual downscaling",
            f"{shrunk[0]:.0f}, {shrunk[0] - busy_end_s:.0f} after the load fell" if shrunk else "never",
            bool(shrunk) and close(shrunk[0], 1809),
            "when the load falls the text does not say",
            printed=1809,
        ),
        section.says(
            "SLO attainment promptly rises to 90% as the scheduler routes new requests to the newly added idle "
            "instances",
            f"{number(busy, 'later'):.0%} in the second half, {number(fixed, 'later'):.0%} without",
            number(busy, "later") >= 0.9 > number(fixed, "later"),
            printed="90%",
        ),
        section.says(
            "*DualMap* begins gradual downscaling, reducing to 4 instances (Figure 12c), while maintaining over 90% "
            "SLO attainment",
            f"{len(shrunk)} instances go, {number(calm, 'attainment'):.0%} in time",
            sizes[-1][1] == FEW and number(calm, "attainment") > 0.9,
            "one by one",
            printed="90%",
        ),
    ]
    columns = [
        Column("cluster", "cluster"),
        Column("phase", "phase"),
        Column("rate", "requests/s", ".1f"),
        Column("attainment", "in time", ".1%", Basis.MODELLED),
        Column("later", "second half", ".1%", Basis.MODELLED),
        Column("least", "instances", "d"),
        Column("most", "to", "d"),
    ]
    panels = [
        Courses(
            "TTFT in time",
            "time, s",
            "of those that came in 30 s",
            [Course(text, windows, dashed=text != "scaling") for text, (windows, _) in told.items()],
            [Mark("calm", busy_end_s)],
        ),
        Courses("Instances", "time, s", "instances", [Course("scaling", _steps(sizes, windows[-1][0]))], form=".0f"),
    ]
    notes = [
        f"{FEW} instances under {BUSY:g} times what they serve in time, then under {CALM:g} times that; the paper has "
        "4 and 2 requests/s on its instances. One that was added is there after ten seconds. The paper prints no rule "
        "of when: ours is `pinyon.placement.scaling`.",
        MODEL_NOTE,
        ONE_SEED_NOTE,
    ]
    return Result(columns, rows, claims, notes, Picture("DualMap Fig. 12: scaling", panels))


def _steps(sizes: Sequence[tuple[float, int]], end_s: float) -> list[tuple[float, float]]:
    points: list[tuple[float, float]] = []
    for at_s, size in sizes:
        if points:
            points.append((at_s, points[-1][1]))
        points.append((max(1.0, at_s), size))
    return [*points, (end_s, points[-1][1])]


# -- Fig. 13

SIZES = (8, 16, 24, 32)
REQUESTS_EACH = 700
"""A.4 has 1,000 for each instance; the generated trace has enough for 700."""
RATES_EACH = (1.5, 2.0, 2.5, 3.0, 3.5)


@figure("dualmap-fig13", PAPER, "§A.4.1, Fig. 13", "clusters that grow", ("toolagent",))
def fig13(workloads: Sequence[Workload], tell: Tell) -> Result:
    (workload,) = workloads
    if len(workload.rows) < REQUESTS_EACH * SIZES[-1]:
        raise InvalidArgument(f"{workload.name} has less than {REQUESTS_EACH * SIZES[-1]:,} requests", field="trace")
    rows: list[dict[str, Value]] = []
    for size in SIZES:
        load = load_of(workload, "7B", REQUESTS_EACH * size)
        for policy in POLICIES:
            points, p99 = [], 0.0
            for each in RATES_EACH:
                runs = all_seeds(load, PREFILL_ONLY, policy, each * size, tell, size)
                points.append((each * size, mean(runs, "attainment")))
                if points[-1][1] >= 0.9:
                    p99 = mean(runs, "p99_s")
            rows.append(
                {
                    "instances": size,
                    "policy": policy,
                    "goodput": goodput(points),
                    "each": goodput(points) / size,
                    "p99_s": p99,
                    "basis": basis(workload),
                }
            )

    def found(size: int, policy: str) -> float:
        return number(next(row for row in rows if row["instances"] == size and row["policy"] == policy), "each")

    growth = found(SIZES[-1], DUALMAP) / max(1e-9, found(SIZES[0], DUALMAP))
    ahead = {
        size: found(size, DUALMAP) / max(found(size, each) for each in POLICIES if each != DUALMAP) for size in SIZES
    }
    section = Section("§A.4.1")
    claims = [
        section.says(
            "*DualMap* achieves near-linear growth in goodput",
            f"{growth:.0%} for each instance of {SIZES[-1]} of what it is for each of {SIZES[0]}",
            growth >= 0.9,
            "nine tenths count as near-linear; prefill only",
        ),
        section.says(
            "and consistently outperforms Cache Affinity, Least Loaded, Min TTFT, and Preble across all cluster sizes",
            ", ".join(f"{size}: {ratio - 1:+.0%}" for size, ratio in ahead.items()),
            min(ahead.values()) >= 1,
            "against the best of them; where no instance decodes, min TTFT and Preble see all that happens",
        ),
    ]
    columns = [
        Column("instances", "instances", "d"),
        Column("policy", "policy"),
        Column("goodput", "goodput, /s", ".1f", Basis.MODELLED),
        Column("each", "each", ".2f", Basis.MODELLED),
        Column("p99_s", "P99 below it, s", ".1f", Basis.MODELLED),
    ]
    courses = [
        Course(label(policy), [(size, size * found(size, policy)) for size in SIZES], dashed=policy != DUALMAP)
        for policy in POLICIES
    ]
    panel = Courses("Goodput at 90 %", "instances", "requests/s", courses, form=".0f")
    notes = [
        f"{REQUESTS_EACH} requests and a cache of 1M tokens (§4.1) for each instance. What one decision costs (Fig. "
        "13b) is measured by `./dev bench dualmap`, see docs/benchmarks.md.",
        MODEL_NOTE,
        SEEDS_NOTE,
    ]
    return Result(columns, rows, claims, notes, Picture("DualMap Fig. 13: clusters that grow", [panel]))


# -- A.6

PREFILLS, DECODES = 5, 3
SPLIT_RATE = {"conversation": 4.0, "toolagent": 11.0}


@figure("dualmap-a6", PAPER, "§A.6", "prefill and decode apart", ("conversation",), ("toolagent",))
def a6(workloads: Sequence[Workload], tell: Tell) -> Result:
    rows: list[dict[str, Value]] = []
    roles = (Role.PREFILL,) * PREFILLS + (Role.DECODE,) * DECODES
    for workload in workloads:
        load, rate = load_of(workload, "7B"), SPLIT_RATE[workload.name]
        for policy in POLICIES:
            tell(f"{workload.name}: {policy}, {PREFILLS} for prompts, {DECODES} that decode")
            cluster = cluster_of(load, System(DECODING, policy), roles=roles)
            outcomes = cluster.run(at_rate(load.arrivals, rate))
            told = cluster_report(outcomes, SLO_S, SLO_S, WARM_UP)
            rows.append(
                {
                    "workload": workload.name,
                    "policy": policy,
                    "rate": rate,
                    "attainment": told["attainment"],
                    "p90_s": told["p90_s"],
                    "p99_s": told["p99_s"],
                    "hits": told["hit_ratio"],
                    "prefills": len({each.prefill for each in outcomes}),
                    "basis": basis(workload),
                }
            )
    claims = [_a6_claim(rows, workload.name) for workload in workloads]
    columns = [
        Column("workload", "workload"),
        Column("policy", "policy"),
        Column("rate", "requests/s", ".1f"),
        Column("attainment", "in time", ".1%", Basis.MODELLED),
        Column("p90_s", "P90, s", ".2f", Basis.MODELLED),
        Column("p99_s", "P99, s", ".2f", Basis.MODELLED),
        Column("hits", "reused", ".1%", Basis.MODELLED),
    ]
    values: Mapping[str, Sequence[float | None]] = {
        label(policy): [number(row, "attainment") for row in rows if row["policy"] == policy] for policy in POLICIES
    }
    panel = Bars("TTFT in time", "of the requests", [shown(each) for each in workloads], values)
    notes = [
        f"{PREFILLS} instances for prompts, among which the policy chooses, and {DECODES} that decode, chosen by their "
        "load; KV moves while it is computed, over 100 Gbit/s.",
        MODEL_NOTE,
        ONE_SEED_NOTE,
    ]
    return Result(columns, rows, claims, notes, Picture("DualMap A.6: prefill and decode apart", [panel]))


def _a6_claim(rows: Rows, workload: str) -> Claim:
    found = {str(row["policy"]): number(row, "attainment") for row in rows if row["workload"] == workload}
    return Section("§A.6").says(
        "In PD-disaggregated systems, TTFT is dominated by the prefill phase. *DualMap* therefore performs routing "
        "exclusively on the prefill instances",
        ", ".join(f"{label(policy)} {share:.1%}" for policy, share in found.items()),
        found[DUALMAP] > max(found["cache_affinity"], found["least_loaded"]),
        f"{workload}: agrees if it is ahead of cache affinity and least loaded there, too",
    )
