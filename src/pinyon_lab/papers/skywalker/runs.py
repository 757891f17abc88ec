"""SkyWalker's testbed in the simulator: L4 replicas in up to three regions, and the results of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random
from typing import Final, NamedTuple, TypeVar

from pinyon.profiles.engine_profile import load_profile
from pinyon.profiles.machine_profile import load_machine
from pinyon_lab.figures.figure import Basis, Column, Compared, FigureInputs, Table, Tell, columns
from pinyon_lab.figures.rows import bars, up_to
from pinyon_lab.pictures import Bars
from pinyon_lab.simulator.regions.measures import Measured, Samples, measured
from pinyon_lab.simulator.regions.settings import SYSTEMS, RoutingSystem, WorldSettings, sglang_instance
from pinyon_lab.simulator.regions.workloads import sources
from pinyon_lab.simulator.regions.world import RegionsWorld

PAPER: Final = "SkyWalker"
MACHINE: Final = "l4-llama-8b"
SEED: Final = 1
MODEL_NOTE: Final = (
    "Modelled: an L4 by its profile (docs/design/simulator.md), requests of 16-token blocks, served as SGLang does: "
    "prompts before decoding, no request waits while there is room for its prompt. Round trips of 90 ms (US, Europe), "
    "150 ms (US, Asia) and 200 ms (Europe, Asia): only the largest is printed. Pushing of SkyWalker's systems is the "
    "paper's: by probes of 100 ms, without credits; `pinyon` is the same with credits between probes and load that "
    "comes with answers. All of them route by the modules that pinyon's load balancer routes by."
)
LENGTHS_NOTE: Final = (
    "By construction: lengths and turns of conversations are what the data sets' own authors publish, and users have "
    "as much in common as §3.2 prints; lengths of trees are those of SGLang's benchmark of the same trees. "
    "SkyWalker's text prints neither lengths, nor think time (none here), nor how long it measured."
)
QUICK_NOTE: Final = "Quick: windows of a seventh; differences of a few percent mean nothing."
COLUMNS: Final = [
    *columns(Basis.MODELLED, output_tokens_per_s=("tokens/s", ",.0f"), requests_per_s=("requests/s", ".2f")),
    *columns(Basis.MODELLED, ttft_p50_s=("TTFT P50, s", ".2f"), ttft_mean_s=("mean", ".2f"), ttft_p90_s=("P90", ".2f")),
    *columns(Basis.MODELLED, e2e_p50_s=("E2E P50, s", ".1f"), hits=("hits", ".1%"), uneven=("busiest/idlest", ".2f")),
    *columns(Basis.MODELLED, used=("KV used", ".0%"), waiting=("without room", ".1f"), forwarded=("forwarded", ".1%")),
]


@dataclass(frozen=True, slots=True)
class RegionLoad:
    """A workload, and its instances and clients by region. Requests that end from ``warm_s`` to ``until_s`` count."""

    workload: str
    instances: tuple[tuple[str, int], ...]
    clients: tuple[tuple[str, int], ...]
    warm_s: float = 60.0
    until_s: float = 360.0

    def quick(self) -> RegionLoad:
        """Returns the load with a seventh of its window."""
        return replace(self, warm_s=self.warm_s / 4, until_s=(self.until_s - self.warm_s) / 7 + self.warm_s / 4)


class SkyWalkerResults(NamedTuple):
    """The results of a run; ``used`` has a value per instance for each second."""

    measured: Measured
    used: Sequence[Sequence[float]]


At = TypeVar("At", int, str)
Runs = Mapping[tuple[At, str], Measured]
"""The results by what varies, mostly the load, and by the system's name."""


def runs_of(
    loads: Mapping[At, RegionLoad], systems: Sequence[RoutingSystem | str], given: FigureInputs
) -> dict[tuple[At, str], Measured]:
    """Runs each load on each system, shorter where the figure is made quickly."""
    chosen = [SYSTEMS[each] if isinstance(each, str) else each for each in systems]
    windows = {at: load.quick() if given.quick else load for at, load in loads.items()}
    return {(at, each.name): ran(load, each, given.tell).measured for at, load in windows.items() for each in chosen}


def ran(load: RegionLoad, system: RoutingSystem, tell: Tell) -> SkyWalkerResults:
    """Runs a load on a system, or returns the cached result of the same run."""
    clients = "/".join([str(count) for _, count in load.clients])
    instances = "/".join([str(count) for _, count in load.instances])
    tell(f"{load.workload}, {clients} clients, {instances} instances: {system.name}")
    return _ran(load, system)


@lru_cache(maxsize=256)
def _ran(load: RegionLoad, system: RoutingSystem) -> SkyWalkerResults:
    machine = load_machine(MACHINE)
    engine = load_profile(machine.engine)
    world = RegionsWorld(WorldSettings(dict(load.instances)), system, sglang_instance(machine), machine, engine)
    regions = [region for region, _ in load.clients]
    by_region = sources(load.workload, regions, Random(f"{SEED} {load.workload}"))
    for region, count in load.clients:
        world.add_clients(region, by_region[region], Random(f"{SEED} {region}"), count)
    samples = Samples(world, load.warm_s)
    world.run(load.until_s)
    return SkyWalkerResults(measured(world, samples, load.warm_s, load.until_s), samples.used)


def table(
    given: FigureInputs, names: Sequence[Column], runs: Runs[At], shown: Sequence[Column] = COLUMNS, section: str = ""
) -> Table:
    """Returns a row for each run, with the columns of what it is a run of, and those ``shown`` of the results."""
    found = Table(given, *names, *shown, section=section)
    for what, each in runs.items():
        values = each.as_dict()
        found.add(*what, *(values[column.key] for column in shown), **{each.key: values[each.key] for each in COLUMNS})
    return found


def notes(quick: bool, *more: str) -> list[str]:
    return [MODEL_NOTE, LENGTHS_NOTE, *more, *([QUICK_NOTE] if quick else [])]


def panel(
    title: str, label: str, runs: Runs[At], value: Callable[[Measured], float], form: str, group: str = "{}"
) -> Bars:
    """Returns bars by what varies and system; ``group`` is the format of what varies."""
    return bars(title, label, {key: value(each) for key, each in runs.items()}, form, group=group.format)


def tokens(each: Measured) -> float:
    return each.output_tokens_per_s


def within(values: Sequence[float], low: float, high: float) -> bool:
    """Returns whether all values are in the printed range, a fifth more or less."""
    return all(low / 1.2 <= value <= high * 1.2 for value in values)


def ranged(
    values: Sequence[float],
    low: float,
    high: float,
    form: str = ".2f",
    agrees: Callable[[Sequence[float], float, float], bool] = within,
) -> Compared:
    """Compares values, ratios or in ``form`` percent, with the printed range."""
    scale, unit = (100, "%") if form.endswith("%") else (1, "×")
    printed = dict.fromkeys(f"{scale * each:g}" for each in (low, high))
    ours = up_to(values, form) if unit == "%" else f"{up_to(values, form)}×"
    return Compared(ours, agrees(values, low, high), f"{' to '.join(printed)}{unit}")


def gained(ratios: Sequence[float], low: float, high: float) -> bool:
    """Returns whether all gains (ratio less 1) are in the printed range, a fifth more or less."""
    return within([ratio - 1 for ratio in ratios], low - 1, high - 1)
