"""DualMap §4.2: requests in time (Fig. 3) and latencies (Fig. 4), by policy and rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

from pinyon_lab.figures.figure import Basis, Given, Result, Rows, Section, Table, Tell, Value, columns, figure
from pinyon_lab.figures.rows import basis, by, cells, courses, number, points, those
from pinyon_lab.figures.workload import Workload
from pinyon_lab.papers.dualmap.runs import (
    DECODING,
    DUALMAP,
    MODEL_NOTE,
    PAPER,
    POLICIES,
    PREFILL_ONLY,
    SEEDS_NOTE,
    SHARE,
    all_seeds,
    goodput,
    label,
    load_of,
    mean,
    means,
)
from pinyon_lab.pictures import Course, Courses

RATES: dict[tuple[str, str, str], tuple[float, ...]] = {
    ("conversation", "7B", DECODING): (3.0, 4.0, 5.0, 6.0, 7.0),
    ("conversation", "14B", DECODING): (2.0, 3.0, 4.0, 5.0, 6.0),
    ("toolagent", "7B", DECODING): (8.0, 11.0, 14.0, 17.0, 20.0),
    ("toolagent", "14B", DECODING): (5.0, 7.0, 9.0, 11.0, 13.0),
    ("conversation", "7B", PREFILL_ONLY): (6.0, 7.0, 8.0, 9.0, 10.0),
    ("toolagent", "7B", PREFILL_ONLY): (14.0, 17.0, 20.0, 23.0, 26.0),
}
"""The rates in requests/s: from one at which all requests are in time to one at which few are."""


# -- Figs. 3 and 4


def _rated(workloads: Sequence[Workload], tell: Tell, kinds: Sequence[str]) -> Table:
    table = Table(
        *columns(workload="workload", model="model", kind="simulated", policy="policy", rate=("rate", ".1f")),
        *columns(Basis.MODELLED, attainment=("in time", ".1%"), least=("least", ".1%"), most=("most", ".1%")),
        *columns(Basis.MODELLED, p99_s=("P99, s", ".1f"), last_quarter=("last ¼", ".1%")),
        *columns(Basis.MODELLED, longest_tenth=("longest", ".1%"), p50_s=("TTFT P50, s", ".2f"), p90_s=("P90", ".2f")),
        *columns(Basis.MODELLED, e2e_p50_s=("E2E P50, s", ".1f"), e2e_p90_s=("P90", ".1f")),
    )
    names = {workload.name: workload for workload in workloads}
    for (name, size, kind), rates in RATES.items():
        if kind not in kinds or name not in names:
            continue
        load = load_of(names[name], size)
        for policy, rate in product(POLICIES, rates):
            runs = all_seeds(load, kind, policy, rate, tell)
            attained = [run.attainment for run in runs]
            values = mean(runs, "attainment"), min(attained), max(attained)
            others = means(runs, *[column.key for column in table.columns[8:]])
            hits, rests_on = mean(runs, "hits"), basis(names[name])
            table.add(name, size, kind, policy, rate, *values, *others, hits=hits, basis=rests_on)
    return table


def _goodputs(rows: Rows, **where: Value) -> dict[str, float]:
    """Returns the goodput by policy, in requests/s."""
    return {policy: goodput(points(those(rows, policy=policy, **where), "rate", "attainment")) for policy in POLICIES}


def _curves(rows: Rows, key: str, here: Mapping[str, Value]) -> list[Course]:
    """Returns a curve for each policy over the rates of a setting."""
    return courses(cells(rows, "policy", "rate", key, **here), label, DUALMAP)


def _settings_of(rows: Rows) -> list[tuple[Value, Value, Value]]:
    return list(dict.fromkeys((row["workload"], row["model"], row["kind"]) for row in rows))


@figure("dualmap-fig3", PAPER, "§4.2, Fig. 3", "requests in time", ("conversation",), ("toolagent",))
def fig3(given: Given) -> Result:
    table = _rated(given.workloads, given.tell, (DECODING, PREFILL_ONLY))
    table.columns, rows = table.columns[:11], table.rows
    section, panels = table.section("§4.2"), []
    for workload, model, kind in _settings_of(rows):
        here = {"workload": workload, "model": model, "kind": kind}
        found, text = _goodputs(rows, **here), f"{workload}, {model}, {kind}"
        _goodput_claim(section, found, str(workload), text)
        _others_claim(section, found, text)
        panels.append(Courses(text, "requests/s", "in time", _curves(rows, "attainment", here)))
    names = dict.fromkeys(row["workload"] for row in rows)
    for name in names:
        _capacity_claim(section, those(rows, workload=name, kind=DECODING), str(name))
    notes = [
        f"Goodput: the rate at which {SHARE:.0%} are in time, between the rates that were run. In time: TTFT of 5 s at "
        "most. Beside it the 99th percentile, attainment of the last quarter by arrival, which falls where a queue "
        "grows, and of the tenth with the longest prompts, which a policy might starve.",
        MODEL_NOTE,
        SEEDS_NOTE,
    ]
    return table.result("DualMap Fig. 3: requests in time", panels, notes)


def _best(found: Mapping[str, float]) -> tuple[str, float]:
    """Returns the best baseline and its value."""
    name = max((each for each in found if each != DUALMAP), key=found.__getitem__)
    return name, found[name]


def _goodput_claim(section: Section, found: Mapping[str, float], workload: str, where: str) -> None:
    said, low, high = {
        "toolagent": ("goodput improves by 16.7%–48% compared to the best baseline", 0.167, 0.48),
        "conversation": ("its goodput improves by 14.3%–40% compared to the best baseline", 0.143, 0.40),
    }[workload]
    name, best = _best(found)
    gain = found[DUALMAP] / best - 1 if best else 0.0
    section.says(
        said,
        f"{gain:+.0%}: {found[DUALMAP]:.2f}/s against {best:.2f}/s of {label(name)}",
        0.8 * low <= gain <= 1.2 * high,
        where,
        printed=f"{low:.1%} to {high:.0%}",
    )


def _others_claim(section: Section, found: Mapping[str, float], where: str) -> None:
    _, best = _best(found)
    section.says(
        "consistently outperforms other approaches",
        ", ".join(f"{label(policy)} {found[policy]:.2f}" for policy in POLICIES),
        found[DUALMAP] > best,
        f"goodput, requests/s; agrees if ahead of all four; {where}",
    )


def _capacity_claim(section: Section, rows: Rows, workload: str) -> None:
    said, printed, least = {
        "toolagent": ("Its Effective Request Capacity increases by up to 125%", "up to 125%", 0.8 * 1.25),
        "conversation": ("Its Effective Request Capacity increases by 40.6%–80%", "40.6% to 80%", 0.406),
    }[workload]
    gains = []
    for model in dict.fromkeys(row["model"] for row in rows):
        for rate in dict.fromkeys(row["rate"] for row in rows if row["model"] == model):
            found = by(rows, "policy", "attainment", model=model, rate=rate)
            gains.append(found[DUALMAP] / max(1e-9, _best(found)[1]) - 1)
    section.says(
        said,
        f"{min(gains):+.0%} to {max(gains):+.0%}",
        max(gains) >= least,
        f"of both models, against the best baseline at each rate that was run; agrees if the most is {least:.0%}",
        printed=printed,
    )


@figure("dualmap-fig4", PAPER, "§4.2, Fig. 4", "TTFT and end-to-end", ("conversation",), ("toolagent",))
def fig4(given: Given) -> Result:
    table = _rated(given.workloads, given.tell, (DECODING,))
    table.columns, rows = (*table.columns[:5], *table.columns[11:]), table.rows
    panels = []
    cut: dict[str, list[float]] = {"p50_s": [], "p90_s": []}
    for workload, model, kind in _settings_of(rows):
        here = {"workload": workload, "model": model, "kind": kind}
        served = [number(row, "rate") for row in those(rows, **here) if number(row, "attainment") >= SHARE]
        rate = max(served, default=min(number(row, "rate") for row in those(rows, **here)))
        for key, found in cut.items():
            values = by(rows, "policy", key, rate=rate, **here)
            least = min(value for policy, value in values.items() if policy != DUALMAP)
            found.append(1 - values[DUALMAP] / least)
        curves = _curves(rows, "p90_s", here)
        panels.append(Courses(f"{workload}, {model}", "requests/s", "TTFT P90, s", curves, form=".0f"))

    section = table.section("§4.2")

    def claim(said: str, printed: str, key: str, low: float, high: float) -> None:
        least, most = min(cut[key]), max(cut[key])
        agrees = least >= 0.8 * low and most <= min(1.0, 1.2 * high)
        why = "at the highest rate of each setting that any policy serves, against the best baseline by that percentile"
        section.says(said, f"{least:.0%} to {most:.0%}", agrees, why, printed=printed)

    claim("*DualMap* reduces P50 TTFT by 55.4%–97.4%", "55.4% to 97.4%", "p50_s", 0.554, 0.974)
    claim("and reduces P90 TTFT by 82.3%–97%", "82.3% to 97%", "p90_s", 0.823, 0.97)
    return table.result("DualMap Fig. 4: TTFT", panels, [MODEL_NOTE, SEEDS_NOTE])
