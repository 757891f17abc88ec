"""SkyWalker's testbed in the simulator: L4 replicas in up to three regions, and the results of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random
from typing import Any, Final

from pinyon.profiles.engine_profile import load_profile
from pinyon.profiles.machine_profile import load_machine
from pinyon_lab.figures.figure import Basis, Column, Row, Tell, Value
from pinyon_lab.pictures import Bars
from pinyon_lab.simulator.regions.measures import Measured, Samples, measured
from pinyon_lab.simulator.regions.settings import SYSTEMS, System, WorldSettings, sglang_instance
from pinyon_lab.simulator.regions.workloads import sources
from pinyon_lab.simulator.regions.world import World

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
    Column("output_tokens_per_s", "tokens/s", ",.0f", Basis.MODELLED),
    Column("requests_per_s", "requests/s", ".2f", Basis.MODELLED),
    Column("ttft_p50_s", "TTFT P50, s", ".2f", Basis.MODELLED),
    Column("ttft_mean_s", "mean", ".2f", Basis.MODELLED),
    Column("ttft_p90_s", "P90", ".2f", Basis.MODELLED),
    Column("e2e_p50_s", "E2E P50, s", ".1f", Basis.MODELLED),
    Column("hits", "hits", ".1%", Basis.MODELLED),
    Column("uneven", "busiest/idlest", ".2f", Basis.MODELLED),
    Column("used", "KV used", ".0%", Basis.MODELLED),
    Column("waiting", "without room", ".1f", Basis.MODELLED),
    Column("forwarded", "forwarded", ".1%", Basis.MODELLED),
]


@dataclass(frozen=True, slots=True)
class Load:
    """A workload, and its instances and clients by region. Requests that end from ``warm_s`` to ``until_s`` count."""

    workload: str
    instances: tuple[tuple[str, int], ...]
    clients: tuple[tuple[str, int], ...]
    warm_s: float = 60.0
    until_s: float = 360.0
    seed: int = SEED

    def quickly(self, quick: bool) -> Load:
        """Returns the load with a seventh of its window if ``quick``, else the load itself."""
        return self.quick() if quick else self

    def quick(self) -> Load:
        return replace(self, warm_s=self.warm_s / 4, until_s=(self.until_s - self.warm_s) / 7 + self.warm_s / 4)


@dataclass(frozen=True, slots=True)
class Ran:
    """The results of a run; ``outstanding`` and ``used`` have a value per instance for each second."""

    measured: Measured
    outstanding: Sequence[Sequence[int]]
    used: Sequence[Sequence[float]]


def ran(load: Load, system: System | str, tell: Tell) -> Ran:
    """Runs a load on a system, or returns the cached result of the same run."""
    system = SYSTEMS[system] if isinstance(system, str) else system
    clients = "/".join([str(count) for _, count in load.clients])
    instances = "/".join([str(count) for _, count in load.instances])
    tell(f"{load.workload}, {clients} clients, {instances} instances: {system.name}")
    return _ran(load, system)


@lru_cache(maxsize=256)
def _ran(load: Load, system: System) -> Ran:
    machine = load_machine(MACHINE)
    engine = load_profile(machine.engine)
    world = World(WorldSettings(dict(load.instances)), system, sglang_instance(machine), machine, engine)
    regions = [region for region, _ in load.clients]
    by_region = sources(load.workload, regions, Random(f"{load.seed} {load.workload}"))
    for region, count in load.clients:
        world.add_clients(region, by_region[region], Random(f"{load.seed} {region}"), count)
    samples = Samples(world, load.warm_s)
    world.run(load.until_s)
    return Ran(measured(world, samples, load.warm_s, load.until_s), samples.outstanding, samples.used)


def row(names: Row, found: Ran) -> dict[str, Value]:
    values = found.measured.as_dict()
    return {**names, **{column.key: values[column.key] for column in COLUMNS}}


def notes(quick: bool, *more: str) -> list[str]:
    return [MODEL_NOTE, LENGTHS_NOTE, *more, *([QUICK_NOTE] if quick else [])]


def bars(
    title: str,
    label: str,
    groups: Mapping[str, Any],
    runs: Mapping[tuple[Any, str], Ran],
    value: Callable[[Measured], float],
    form: str,
) -> Bars:
    """Returns bars by group and system; ``groups`` maps labels to the groups in ``runs``."""
    names = dict.fromkeys(name for _, name in runs)
    values = {name: [value(runs[group, name].measured) for group in groups.values()] for name in names}
    return Bars(title, label, list(groups), values, form)


def tokens(each: Measured) -> float:
    return each.output_tokens_per_s


def within(values: Sequence[float], low: float, high: float) -> bool:
    """Returns whether all values are in the printed range, a fifth more or less."""
    return all(low / 1.2 <= value <= high * 1.2 for value in values)


def gained(ratios: Sequence[float], low: float, high: float) -> bool:
    """Returns whether all gains (ratio less 1) are in the printed range, a fifth more or less."""
    return within([ratio - 1 for ratio in ratios], low - 1, high - 1)
