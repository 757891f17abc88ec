"""SkyWalker §2.2: the load of five regions over a day, and the cost of serving it (Fig. 3).

§3.2: prefixes shared by users and regions (Fig. 5), and how consistent hashing reuses them (Fig. 6)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Final, NamedTuple

from pinyon_lab.figures.figure import Basis, Column, FigureInputs, Result, Table, columns, figure
from pinyon_lab.figures.rows import bars, near
from pinyon_lab.papers.skywalker.runs import LENGTHS_NOTE, MODEL_NOTE, PAPER, SEED, RegionLoad, runs_of, within
from pinyon_lab.pictures import Bars, Course, Courses, Panel
from pinyon_lab.simulator.regions.chats import TEMPLATE_TOKENS
from pinyon_lab.simulator.regions.day import DAY_H, ON_DEMAND, RESERVED, WILDCHAT_DAY, aggregate, costs, variance
from pinyon_lab.simulator.regions.programs import Program, ProgramStep
from pinyon_lab.simulator.regions.settings import BLOCK_TOKENS, GLOBAL_VIEW, PAPERS, RoutingSystem
from pinyon_lab.simulator.regions.workloads import sources

PER_INSTANCE: Final = 0.01
"""One instance's share of the largest region's peak: so small that whole instances make no difference."""

FREE: Final = "the shape of the wave, three of the five ratios and all shares are free"


@figure("skywalker-fig3", PAPER, "§2.2, Fig. 3", "load of five regions over a day, and its cost")
def fig3(given: FigureInputs) -> Result:
    loads = {region: course.slots() for region, course in WILDCHAT_DAY.items()}
    together = aggregate(list(loads.values()))
    day = costs(loads, PER_INSTANCE)
    table = Table(
        given,
        Column("region", "region"),
        *(Column(key, key, ".2f", Basis.CONSTRUCTION) for key in ("peak", "trough", "variance")),
        section="§2.2, Fig. 3a",
        basis=Basis.CONSTRUCTION,
    )
    for region, each in {**loads, "together": together}.items():
        table.add(region, max(each), min(each), variance(each), basis=Basis.CONSTRUCTION)
    lone = [variance(each) for each in loads.values()]
    table.says(
        "Before aggregation, per-region load variance ranges from 2.88× to 32.64×",
        f"{min(lone):.2f} to {max(lone):.2f}×",
        True,
        "put in",
        printed="2.88 to 32.64×",
    )
    table.says(
        "after aggregation, the variance is reduced to 1.29×",
        f"{variance(together):.2f}×",
        abs(variance(together) - 1.29) < 0.02,
        "put in: all regions peak at three in the afternoon, and who has how much is chosen so that this comes out",
        printed="1.29×",
    )
    table.finds(
        "provisioning based on the peak aggregated global load can reduce costs by 40.5%",
        near(day.saved, 0.405, "{:.1%}"),
        f"follows from the loads, which are put in: {FREE}; agrees within a fifth",
        section="§2.2, Fig. 3b",
    )
    table.finds(
        "this approach incurs 2.2× the cost",
        near(day.on_demand_ratio, 2.2, text="2.2×"),
        f"follows from the loads, as above, and the printed prices, ${RESERVED} and ${ON_DEMAND} per hour (§2.1); "
        "agrees within a fifth",
        section="§2.2, Fig. 3b",
    )
    hours = [place * DAY_H / len(together) for place in range(len(together))]
    courses = [
        Course(name, list(zip(hours, each, strict=True)), dashed=name == "together")
        for name, each in {**loads, "together": together}.items()
    ]
    least = day.shared_dollars
    cost = {
        "region-local, reserved": [day.region_local_dollars / least],
        "shared, reserved": [1.0],
        "on demand": [day.on_demand_ratio],
    }
    title, hour, share = "Load (by construction)", "hour of the day, UTC", "of the largest region's peak"
    panels: list[Panel] = [
        Courses(title, hour, share, courses, form=".1f", linear=True),
        Bars("Cost", "shared = 1", ("one day",), cost, ".2f"),
    ]
    note = (
        "By construction: one wave a day for each region, with the peak-to-trough ratios that are printed of the five "
        "(the three between them are ours). `pinyon simulate --regions` serves such a day."
    )
    return table.result("SkyWalker Fig. 3", panels, [note])


PAIRS = 200_000
"""The largest number of pairs of each kind that are compared."""


class Similarities(NamedTuple):
    """The mean similarities over pairs of requests; -1 where there are no pairs."""

    within_user: float
    across_users: float
    across_regions: float


def similarity(one: ProgramStep, other: ProgramStep, block_tokens: int, skipped: int) -> float:
    """Returns the common prefix's share of the shorter prompt, in whole blocks: ``len(common prefix) / min(len)``.

    The first ``skipped`` tokens, a template that all prompts have, do not count."""
    shared = 0
    for mine, theirs in zip(one.keys, other.keys, strict=False):
        if mine != theirs:
            break
        shared += 1
    tokens = max(1, min(one.tokens, other.tokens) - skipped)
    return min(1.0, max(0, shared * block_tokens - skipped) / tokens)


def similarities(
    programs: Mapping[str, Sequence[Program]], block_tokens: int, skipped: int, rng: Random
) -> Similarities:
    """Returns the mean similarities of all requests of ``programs``, which are by region."""
    everyone = [
        (region, program.user, step) for region, some in programs.items() for program in some for step in program.steps
    ]
    by_user: dict[str, list[ProgramStep]] = {}
    for _, user, step in everyone:
        by_user.setdefault(user, []).append(step)
    same = [(one, other) for steps in by_user.values() for place, one in enumerate(steps) for other in steps[:place]]
    if len(same) > PAIRS:
        same = rng.sample(same, PAIRS)
    across: list[float] = []
    far: list[float] = []
    for _ in range(PAIRS):
        (here, user, one), (there, another, other) = rng.choice(everyone), rng.choice(everyone)
        if user != another:
            alike = similarity(one, other, block_tokens, skipped)
            across.append(alike)
            if here != there:
                far.append(alike)
    return Similarities(
        _mean([similarity(one, other, block_tokens, skipped) for one, other in same]), _mean(across), _mean(far)
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else -1.0


REGIONS = ("us", "eu", "asia")
PROGRAMS = 1_500
"""The number of programs of each region."""
PRINTED5: Final = (("arena", "ChatBot Arena", 2.47), ("wildchat", "WildChat", 7.60))
FAR = 0.025


@figure("skywalker-fig5", PAPER, "§3.2, Fig. 5", "prefix similarity of users and regions")
def fig5(given: FigureInputs) -> Result:
    keys = ("within_user", "across_users", "across_regions")
    table = Table(
        given,
        Column("data", "data set"),
        *(Column(key, key.replace("_", " "), ".1%", Basis.CONSTRUCTION) for key in keys),
        Column("ratio", "within/across users", ".2f", Basis.CONSTRUCTION),
        section="§3.2, Fig. 5a",
        basis=Basis.CONSTRUCTION,
    )
    for workload, name, printed in PRINTED5:
        given.tell(f"{name}: pairs of requests")
        by_region = sources(workload, REGIONS, Random(f"{SEED} {workload}"))
        programs = {}
        for region, source in by_region.items():
            rng = Random(f"{SEED} {workload} {region}")
            programs[region] = [source.program(rng) for _ in range(PROGRAMS)]
        found = similarities(programs, BLOCK_TOKENS, TEMPLATE_TOKENS, Random(SEED))
        ratio = found.within_user / found.across_users
        table.add(name, *found, ratio, basis=Basis.CONSTRUCTION)
        table.finds(
            f"{printed:.2f}× for {name}",
            near(ratio, printed),
            "within users by across users. Put in: openings that users, regions and everybody have in common. "
            "Agrees within a fifth",
        )
        if workload == "wildchat":
            table.says(
                "requests across regions only have 2.5% prefix affinity",
                f"{found.across_regions:.1%}",
                abs(found.across_regions - FAR) < FAR / 2,
                "put in; agrees within a half",
                printed="2.5%",
            )
    values = {key.replace("_", " "): table.rows.column(key) for key in keys}
    panel = Bars("Prefix similarity", "of the shorter prompt", tuple(name for _, name, _ in PRINTED5), values, ".1%")
    note = (
        "Over all pairs of requests (of 200,000 at most), in blocks of 16 tokens, without the chat template, which "
        "all have. The heat map of Fig. 5b shows the same by user."
    )
    return table.result("SkyWalker Fig. 5", [panel], [LENGTHS_NOTE, note])


CH, OPTIMUM, TREE = "ch", "optimum", "skywalker"
SYSTEMS6: Final = (
    RoutingSystem(CH, "consistent_hash", "blind", forwards=False, told=False),
    RoutingSystem(TREE, "skywalker", PAPERS, forwards=False, told=False),
    RoutingSystem(OPTIMUM, GLOBAL_VIEW, PAPERS, forwards=False, told=False),
)
PRINTED6: Final = (
    ("cross-user", "The lack of cross-user prefix sharing results in a 16.49% prefix hit rate drop", 0.1649, 80),
    ("bursty", "CH leads to 7.07% lower hit rate", 0.0707, 50),
    (
        "heterogeneous",
        "A similar trend is observed when users submit heterogeneous programs, resulting in a 8.78% gap",
        0.0878,
        20,
    ),
)
"""The workload, the claim, the printed gap, and the number of clients. With so many, requests hold about a third of the
memory, and the cache has the rest."""
WHY: Final = {
    "bursty": ". An instance takes such a burst without losing what it has in its cache: CH has no user's opening twice"
}


@figure("skywalker-fig6", PAPER, "§3.2, Fig. 6", "hits of consistent hashing and of the optimum", has_quick_way=True)
def fig6(given: FigureInputs) -> Result:
    loads = {name: RegionLoad(name, (("us", 4),), (("us", clients),), 120.0, 720.0) for name, _, _, clients in PRINTED6}
    runs = runs_of(loads, SYSTEMS6, given)
    hits = {key: found.hits for key, found in runs.items()}
    table = Table(
        given,
        Column("workload", "workload"),
        *(Column(system.name, system.name, ".1%", Basis.MODELLED) for system in SYSTEMS6),
        *columns(Basis.MODELLED, gap=("optimum − ch", ".1%"), used=("KV used", ".0%")),
    )
    for workload, said, printed, _ in PRINTED6:
        gap = hits[workload, OPTIMUM] - hits[workload, CH]
        here = (hits[workload, system.name] for system in SYSTEMS6)
        table.add(workload, *here, gap, runs[workload, CH].used)
        table.says(
            said,
            f"{gap:.1%}",
            within([gap], printed, printed),
            "in points, as we read it; agrees within a fifth, the order if the optimum has more by two points: "
            f"neither workloads nor replicas of this figure are printed{WHY.get(workload, '')}",
            printed=f"{printed:.2%}",
            order=gap > 0.02,
            section="§3.2, Fig. 6",
        )
    nearer = {workload: (hits[workload, TREE], hits[workload, CH]) for workload, *_ in PRINTED6}
    table.says(
        "With that, we observe SkyWalker more closely approaches the performance of an optimal solution",
        ", ".join(f"{name}: {tree:.1%} against {ring:.1%} of CH" for name, (tree, ring) in nearer.items()),
        all(tree > ring for tree, ring in nearer.values()),
        "CH pushes blindly, the others by pending requests",
    )
    note = (
        "The optimum looks into all caches and takes who holds most of the prompt, then the least busy. The workloads "
        "are ours: requests of WildChat's mean lengths, one turn each, of which four of five begin with an opening. "
        "Cross-user: 150 of them, which all users have in common: too many for the cache of one instance. Bursty: the "
        "user's own, and one to four requests of one user at once (§3.2: up to 4×). Heterogeneous: four at once, with "
        "any of the 150."
    )
    panel = bars("KV cache hits", "of prompt tokens", hits)
    return table.result("SkyWalker Fig. 6", [panel], [MODEL_NOTE, note])
