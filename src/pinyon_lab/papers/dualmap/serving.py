"""DualMap by policy: requests in time (Fig. 3) and latencies (Fig. 4) over rates. At one rate: affinity and balance
(Figs. 1, 10, 11), hot instances (Fig. 8), and the gain by each part (Fig. 5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

from pinyon_lab.caches.cache import endless_hits
from pinyon_lab.figures.figure import Basis, Column, FigureInputs, Result, RowList, Table, Value, columns, figure
from pinyon_lab.figures.rows import bars, close, courses, near
from pinyon_lab.papers.dualmap.runs import (
    DECODING,
    DUALMAP,
    MODEL_NOTE,
    PAPER,
    POLICIES,
    PREFILL_ONLY,
    SEEDS_NOTE,
    SHARE,
    SLO_S,
    WARM_UP,
    DualMapResults,
    all_seeds,
    goodput,
    label,
    load_of,
    mean,
    means,
)
from pinyon_lab.pictures import Bars, Course, Courses
from pinyon_lab.simulator.workload import Arrival

RATES: dict[tuple[str, str, str], tuple[float, ...]] = {
    ("conversation", "7B", DECODING): (3.0, 4.0, 5.0, 6.0, 7.0),
    ("conversation", "14B", DECODING): (2.0, 3.0, 4.0, 5.0, 6.0),
    ("toolagent", "7B", DECODING): (8.0, 11.0, 14.0, 17.0, 20.0),
    ("toolagent", "14B", DECODING): (5.0, 7.0, 9.0, 11.0, 13.0),
    ("conversation", "7B", PREFILL_ONLY): (6.0, 7.0, 8.0, 9.0, 10.0),
    ("toolagent", "7B", PREFILL_ONLY): (14.0, 17.0, 20.0, 23.0, 26.0),
}
"""The rates in requests/s, from one at which all requests are in time to one at which few are."""


def _rated(given: FigureInputs, *kinds: str) -> Table:
    table = Table(
        given,
        *columns(workload="workload", model="model", kind="simulated", policy="policy", rate=("rate", ".1f")),
        *columns(Basis.MODELLED, attainment=("in time", ".1%"), least=("least", ".1%"), most=("most", ".1%")),
        *columns(Basis.MODELLED, p99_s=("P99, s", ".1f"), last_quarter=("last ¼", ".1%")),
        *columns(Basis.MODELLED, longest_tenth=("longest", ".1%"), p50_s=("TTFT P50, s", ".2f"), p90_s=("P90", ".2f")),
        *columns(Basis.MODELLED, e2e_p50_s=("E2E P50, s", ".1f"), e2e_p90_s=("P90", ".1f")),
    )
    names = {workload.name: workload for workload in given.workloads}
    for (name, size, kind), rates in RATES.items():
        if kind not in kinds or name not in names:
            continue
        load = load_of(names[name], size)
        for policy, rate in product(POLICIES, rates):
            runs = all_seeds(load, kind, policy, rate, given.tell)
            attained = [run.means["attainment"] for run in runs]
            values = mean(runs, "attainment"), min(attained), max(attained)
            others = means(runs, *[column.key for column in table.columns[8:]])
            hits, rests_on = mean(runs, "hits"), names[name].basis
            table.add(name, size, kind, policy, rate, *values, *others, hits=hits, basis=rests_on)
    return table


def _curves(rows: RowList, key: str, here: Mapping[str, Value]) -> list[Course]:
    """Returns a curve for each policy over the rates of a setting."""
    return courses(rows.cells("policy", "rate", key, **here), label, DUALMAP)


def _settings_of(rows: RowList) -> list[tuple[str, str, str]]:
    return list(dict.fromkeys((row["workload"], row["model"], row["kind"]) for row in rows))


def _best(found: Mapping[str, float]) -> tuple[str, float]:
    """Returns the best baseline and its value."""
    name = max((each for each in found if each != DUALMAP), key=found.__getitem__)
    return name, found[name]


GOODPUT = {
    "toolagent": ("goodput improves by 16.7%–48% compared to the best baseline", 0.167, 0.48),
    "conversation": ("its goodput improves by 14.3%–40% compared to the best baseline", 0.143, 0.40),
}
CAPACITY = {
    "toolagent": ("Its Effective Request Capacity increases by up to 125%", "up to 125%", 0.8 * 1.25),
    "conversation": ("Its Effective Request Capacity increases by 40.6%–80%", "40.6% to 80%", 0.406),
}


@figure("dualmap-fig3", PAPER, "§4.2, Fig. 3", "requests in time", ("conversation",), ("toolagent",))
def fig3(given: FigureInputs) -> Result:
    table = _rated(given, DECODING, PREFILL_ONLY)
    table.columns, rows = table.columns[:11], table.rows
    panels = []
    for workload, model, kind in _settings_of(rows):
        here = {"workload": workload, "model": model, "kind": kind}
        where, by_policy = f"{workload}, {model}, {kind}", {each: rows.those(policy=each, **here) for each in POLICIES}
        found = {policy: goodput(each.points("rate", "attainment")) for policy, each in by_policy.items()}
        said, low, high = GOODPUT[workload]
        name, best = _best(found)
        gain = found[DUALMAP] / best - 1 if best else 0.0
        table.says(
            said,
            f"{gain:+.0%}: {found[DUALMAP]:.2f}/s against {best:.2f}/s of {label(name)}",
            0.8 * low <= gain <= 1.2 * high,
            where,
            printed=f"{low:.1%} to {high:.0%}",
        )
        table.says(
            "consistently outperforms other approaches",
            ", ".join(f"{label(policy)} {found[policy]:.2f}" for policy in POLICIES),
            found[DUALMAP] > best,
            f"goodput, requests/s; agrees if ahead of all four; {where}",
        )
        panels.append(Courses(where, "requests/s", "in time", _curves(rows, "attainment", here)))
    for workload in dict.fromkeys(row["workload"] for row in rows):
        said, printed, least = CAPACITY[workload]
        attained: dict[tuple[str, float], dict[str, float]] = {}
        for row in rows.those(workload=workload, kind=DECODING):
            attained.setdefault((row["model"], row["rate"]), {})[row["policy"]] = row["attainment"]
        gains = [each[DUALMAP] / max(1e-9, _best(each)[1]) - 1 for each in attained.values()]
        table.says(
            said,
            f"{min(gains):+.0%} to {max(gains):+.0%}",
            max(gains) >= least,
            f"of both models, against the best baseline at each rate that was run; agrees if the most is {least:.0%}",
            printed=printed,
        )
    notes = [
        f"Goodput: the rate at which {SHARE:.0%} are in time, between the rates that were run. In time: TTFT of 5 s at "
        "most. Beside it the 99th percentile, attainment of the last quarter by arrival, which falls where a queue "
        "grows, and of the tenth with the longest prompts, which a policy might starve.",
        MODEL_NOTE,
        SEEDS_NOTE,
    ]
    return table.result("DualMap Fig. 3: requests in time", panels, notes)


@figure("dualmap-fig4", PAPER, "§4.2, Fig. 4", "TTFT and end-to-end", ("conversation",), ("toolagent",))
def fig4(given: FigureInputs) -> Result:
    table = _rated(given, DECODING)
    table.columns, rows = (*table.columns[:5], *table.columns[11:]), table.rows
    panels = []
    cut: dict[str, list[float]] = {"p50_s": [], "p90_s": []}
    for workload, model, kind in _settings_of(rows):
        here = {"workload": workload, "model": model, "kind": kind}
        served = [row["rate"] for row in rows.those(**here) if row["attainment"] >= SHARE]
        rate = max(served, default=min(row["rate"] for row in rows.those(**here)))
        for key, found in cut.items():
            values = rows.by("policy", key, rate=rate, **here)
            least = min(value for policy, value in values.items() if policy != DUALMAP)
            found.append(1 - values[DUALMAP] / least)
        curves = _curves(rows, "p90_s", here)
        panels.append(Courses(f"{workload}, {model}", "requests/s", "TTFT P90, s", curves, form=".0f"))
    for said, printed, key, low, high in (
        ("*DualMap* reduces P50 TTFT by 55.4%–97.4%", "55.4% to 97.4%", "p50_s", 0.554, 0.974),
        ("and reduces P90 TTFT by 82.3%–97%", "82.3% to 97%", "p90_s", 0.823, 0.97),
    ):
        least, most = min(cut[key]), max(cut[key])
        agrees = least >= 0.8 * low and most <= min(1.0, 1.2 * high)
        why = "at the highest rate of each setting that any policy serves, against the best baseline by that percentile"
        table.says(said, f"{least:.0%} to {most:.0%}", agrees, why, printed=printed)
    return table.result("DualMap Fig. 4: TTFT", panels, [MODEL_NOTE, SEEDS_NOTE])


SHOWN = {"conversation": 6.0, "toolagent": 14.0}
"""The rates of Figs. 1, 8, 10 and 11 in requests/s, at which systems fill up."""
VARIANTS = {
    "cache affinity": "dualmap:choice=cache_affinity,rebalance=false",
    "least loaded": "dualmap:choice=least_loaded,rebalance=false",
    "min TTFT": "dualmap:choice=min_ttft,rebalance=false",
    "no rebalance": "dualmap:rebalance=false",
    "DualMap": DUALMAP,
}


def _ideal(arrivals: Sequence[Arrival], block_tokens: int) -> float:
    """Returns the share of the tokens that one endless cache would hold: the upper bound of A.3.2."""
    leading = endless_hits(arrival.blocks for arrival in arrivals)
    counted = list(zip(arrivals, leading, strict=True))[WARM_UP:]
    hits = sum(min(blocks * block_tokens, arrival.tokens - 1) for arrival, blocks in counted)
    return hits / max(1, sum(arrival.tokens for arrival, _ in counted))


def _at_one_rate(given: FigureInputs) -> tuple[Table, dict[str, dict[str, DualMapResults]]]:
    table = Table(
        given,
        *columns(workload="workload", policy="policy", rate=("rate", ".1f")),
        *columns(Basis.MODELLED, hits=("reused", ".1%"), of_ideal=("of the bound", ".1%"), cv=("CV", ".2f")),
        *columns(Basis.MODELLED, pending=("waiting tokens", ",.0f"), attainment=("in time", ".1%")),
    )
    first: dict[str, dict[str, DualMapResults]] = {}
    for workload in given.workloads:
        load, rate = load_of(workload, "7B"), SHOWN[workload.name]
        ideal = _ideal(load.arrivals, load.block_tokens)
        for policy in POLICIES:
            runs = all_seeds(load, DECODING, policy, rate, given.tell)
            first.setdefault(workload.name, {})[policy] = runs[0]
            hits, *others = means(runs, "hits", "cv", "pending", "attainment")
            table.add(workload.name, policy, rate, hits, hits / ideal, *others, basis=workload.basis)
    return table, first


_ONE_RATE_NOTES = [
    "At one rate for each workload, where systems fill up; the text names none. Reused: of the tokens of prompts that "
    "count. The bound is one cache without an end. CV (Eq. 1) of the tokens that are still to be computed at each "
    "instance, every ten seconds from the first request that counts to the last arrival, mean of the samples in which "
    "there are any.",
    MODEL_NOTE,
    SEEDS_NOTE,
]


@figure("dualmap-fig1", PAPER, "§2.2, Fig. 1", "affinity and balance", ("conversation",), ("toolagent",))
def fig1(given: FigureInputs) -> Result:
    table, _ = _at_one_rate(given)
    names = [workload.name for workload in given.workloads]
    cvs, hits = ({name: table.rows.by("policy", key, workload=name) for name in names} for key in ("cv", "hits"))
    more = hits["conversation"]["cache_affinity"] / hits["conversation"]["least_loaded"]
    between = all(
        sorted((found["cache_affinity"], found["least_loaded"], found[policy]))[1] == found[policy]
        for found in (*hits.values(), *cvs.values())
        for policy in ("min_ttft", "preble")
    )
    table.finds(
        "the *Cache Affinity* strategy achieves a cache hit rate $1.21 \\times$ higher than that of *Least Loaded* "
        "on the *Conversation* dataset",
        near(more, 1.21, "{:.2f}"),
    )
    table.says(
        "*Least Loaded* achieves near-zero CV",
        ", ".join(f"{name} {cvs[name]['least_loaded']:.2f}" for name in names),
        all(found["least_loaded"] == min(found.values()) for found in cvs.values()),
        "agrees if it is the least of all",
        printed="near zero",
    )
    table.says(
        "*Min TTFT* and *Preble* achieve cache hit rates and load balancing ratios between those of *Cache "
        "Affinity* and *Least Loaded*",
        "; ".join(
            f"{name}: hits {', '.join(f'{hits[name][each]:.0%}' for each in POLICIES)}, "
            f"CV {', '.join(f'{cvs[name][each]:.2f}' for each in POLICIES)}"
            for name in names
        ),
        between,
        "in the order of the table; agrees if both are between the two in hits and in CV",
    )
    reused, spread = (table.rows.cells("workload", "policy", key) for key in ("hits", "cv"))
    panels = [
        bars("Reused", "of the tokens", reused, group=given.shown, label=label),
        bars("Imbalance", "CV", spread, ".1f", group=given.shown, label=label),
    ]
    return table.result("DualMap Fig. 1: affinity and balance", panels, _ONE_RATE_NOTES)


@figure("dualmap-fig10", PAPER, "§A.3.2, Fig. 10", "hit rates", ("conversation",), ("toolagent",))
def fig10(given: FigureInputs) -> Result:
    table, _ = _at_one_rate(given)
    printed = {"conversation": 0.625, "toolagent": 0.964}
    ours, loaded, preble = (
        table.rows.by("workload", "of_ideal", policy=each) for each in (DUALMAP, "least_loaded", "preble")
    )
    table.says(
        "reaching 62.5% and 96.4% of the theoretical upper bound, respectively",
        ", ".join(f"{name} {share:.1%}" for name, share in ours.items()),
        all(close(share, printed[name]) for name, share in ours.items()),
        "what the bound is the text does not say: here one cache without an end",
        printed=", ".join(f"{name} {printed[name]:.1%}" for name in ours),
    )
    table.says(
        "the *Least Loaded* strategy exhibits significantly lower cache hit rates on both workloads",
        ", ".join(f"{name} {share:.0%} of the bound" for name, share in loaded.items()),
        all(loaded[name] < share for name, share in ours.items()),
        "below DualMap's",
    )
    table.says(
        "*Preble* performs similarly to *Least Loaded*",
        ", ".join(f"{name} {preble[name]:.0%} of the bound against {loaded[name]:.0%}" for name in ours),
        all(close(preble[name], loaded[name]) for name in ours),
        "appendix B's Preble takes whoever holds more than half of a prompt",
    )
    values = table.rows.cells("workload", "policy", "of_ideal")
    panel = bars("Reused", "of the bound", values, group=given.shown, label=label)
    return table.result("DualMap Fig. 10: hit rates", [panel], _ONE_RATE_NOTES)


@figure("dualmap-fig11", PAPER, "§A.3.2, Fig. 11", "load", ("conversation",), ("toolagent",))
def fig11(given: FigureInputs) -> Result:
    table, first = _at_one_rate(given)
    pending = {each.name: table.rows.by("policy", "pending", workload=each.name) for each in given.workloads}
    own = {name: found.pop(DUALMAP) for name, found in pending.items()}
    least = {name: min(found.values()) for name, found in pending.items()}
    table.says(
        "*DualMap* maintains consistently low and stable system load throughout the entire experiment, "
        "significantly outperforming all baselines",
        ", ".join(f"{name} {own[name]:,.0f} tokens, the least of the others {least[name]:,.0f}" for name in own),
        all(own[name] < least[name] for name in own),
        "tokens that wait at an instance, mean",
    )
    panels = []
    for workload in given.workloads:
        samples = {policy: run.samples for policy, run in first[workload.name].items()}
        waiting = {(policy, at_s): sum(each) / len(each) for policy, some in samples.items() for at_s, each in some}
        curves = courses(waiting, label, DUALMAP)
        panels.append(Courses(workload.shown, "time, s", "waiting tokens of an instance", curves, form=",.0f"))
    return table.result("DualMap Fig. 11: what waits", panels, _ONE_RATE_NOTES)


OVERLOADED = 0.5 * SLO_S / 127e-6
"""The waiting tokens that overload an instance: half of those computed within the SLO, as in the published code."""


def _hot(result: DualMapResults) -> float:
    """Returns the share of the samples in which one instance is overloaded, but not the average one."""
    hot = [max(loads) > OVERLOADED >= sum(loads) / len(loads) for _, loads in result.samples]
    return sum(hot) / max(1, len(hot))


@figure("dualmap-fig8", PAPER, "§A.2.2, Fig. 8", "hot instances", ("conversation",), ("toolagent",))
def fig8(given: FigureInputs) -> Result:
    table = Table(
        given,
        *columns(workload="workload", variant="DualMap"),
        *columns(Basis.MODELLED, hot=("one is hot", ".1%"), cv=("CV", ".2f")),
    )
    panels = []
    for workload in given.workloads:
        load = load_of(workload, "7B")
        for variant in ("no rebalance", "DualMap"):
            runs = all_seeds(load, DECODING, VARIANTS[variant], SHOWN[workload.name], given.tell)
            hot_share = sum(map(_hot, runs)) / len(runs)
            table.add(workload.name, variant, hot_share, mean(runs, "cv"), basis=workload.basis)
            if variant != "DualMap":
                waiting = {(place, at_s): each for at_s, loads in runs[0].samples for place, each in enumerate(loads)}
                curves = courses(waiting, "instance {}".format)
                panels.append(Courses(workload.shown, "time, s", "waiting tokens", curves, form=",.0f"))
    hot = table.rows.by("workload", "hot", variant="no rebalance")
    table.says(
        "hot instances frequently emerge under *DualMap* scheduling, particularly in the tool-agent workload",
        ", ".join(f"{name} {share:.0%} of the time" for name, share in hot.items()),
        hot.get("toolagent", 1.0) >= hot["conversation"] > 0.05,
        "one instance overloaded and not all of them together, without rebalancing",
    )
    return table.result("DualMap Fig. 8: hot instances", panels, [MODEL_NOTE, SEEDS_NOTE])


ABLATION_RATE = 3.5
"""The rate of conversation on the 14B model, in requests/s; the text names none."""


@figure("dualmap-fig5", PAPER, "§4.3, Fig. 5", "what each part brings", ("conversation",))
def fig5(given: FigureInputs) -> Result:
    (workload,) = given.workloads
    load = load_of(workload, "14B")
    table = Table(
        given,
        Column("variant", "of the pair takes"),
        *columns(Basis.MODELLED, p50_s=("TTFT P50, s", ".2f"), p90_s=("P90", ".2f"), hits=("reused", ".1%")),
        *columns(Basis.MODELLED, cv=("CV", ".2f"), attainment=("in time", ".1%")),
    )
    for variant, policy in VARIANTS.items():
        runs = all_seeds(load, DECODING, policy, ABLATION_RATE, given.tell)
        table.add(variant, *means(runs, "p50_s", "p90_s", "hits", "cv", "attainment"), basis=workload.basis)
    p50, p90, hits = (table.rows.by("variant", key) for key in ("p50_s", "p90_s", "hits"))
    most = p50["cache affinity"], p90["cache affinity"]
    table.says(
        "*DualMap-cache-affinity* shows the highest P50 (Figure 5a) and P90 (Figure 5b) TTFT",
        f"P50 {most[0]:.2f} s, P90 {most[1]:.2f} s",
        most == (max(p50.values()), max(p90.values())),
    )
    where = f"at {ABLATION_RATE}/s"
    table.finds(
        "*DualMap-no-rebalance* performs better, reducing P50 and P90 TTFT by 23.5% and 18.5%",
        near(1 - p50["no rebalance"] / p50["min TTFT"], 0.235, "{:.1%}"),
        where,
    )
    faster = near(1 - p90["no rebalance"] / p90["min TTFT"], 0.185, "{:.1%}")
    table.finds("reducing P50 and P90 TTFT by 23.5% and 18.5%", faster, where)
    faster = near(1 - p90["DualMap"] / p90["no rebalance"], 0.113, "{:.1%}")
    table.finds("further reducing P90 TTFT by 11.3% with hotspot-aware rebalancing", faster, where)
    panels = [
        Bars("TTFT", "seconds", [*VARIANTS], {"P50": [*p50.values()], "P90": [*p90.values()]}, ".1f"),
        Bars("Reused", "of the tokens", [*VARIANTS], {"hits": [*hits.values()]}),
    ]
    return table.result("DualMap Fig. 5: ablation", panels, [MODEL_NOTE, SEEDS_NOTE])
