"""The command ``pinyon simulate --regions``: several regions over a day, and their cost (SkyWalker §2.2, §5)."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from random import Random

from rich.console import Console
from rich.table import Table

from pinyon.core.errors import InvalidArgument
from pinyon.core.request import check_geographies
from pinyon.profiles.engine_profile import load_profile
from pinyon.profiles.machine_profile import load_machine
from pinyon_lab.cli.numbers import REFERENCE, add_numbers, check_numbers, dest, refuse_given
from pinyon_lab.cli.simulated import WITH_MEMORY, results_console, results_table
from pinyon_lab.cli.trace_input import bar, print_json
from pinyon_lab.simulator.regions.day import DAY_H, WILDCHAT_DAY, DailyLoad, aggregate, costs
from pinyon_lab.simulator.regions.measures import Measured, Samples, measured
from pinyon_lab.simulator.regions.settings import ROUND_TRIPS_S, SYSTEMS, RoutingSystem, WorldSettings, sglang_instance
from pinyon_lab.simulator.regions.workloads import WORKLOADS, sources
from pinyon_lab.simulator.regions.world import RegionsWorld

TABLE_WIDTH_MAX = 200
REGIONS_MAX, INSTANCES_MAX, CLIENTS_MAX = 64, 1024, 65_536
WARM_SHARE = 0.1
"""The share of a day that is simulated before the day and does not count."""
_OWN = "system", "routing", "pushing", "workload", "round_trip", "day", "reserved", "on_demand"
_ANY = "regions", "model", "seed", "json", "command"
"""The options that exist only with regions, and those that always exist; with regions, no others may be given."""
FORM = "NAME:INSTANCES:CLIENTS[:PEAK[:RATIO]]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options to ``pinyon simulate``."""
    group = parser.add_argument_group("several regions")
    add = group.add_argument
    add(
        "--regions",
        metavar="REGION,...",
        help=f"each {FORM}: CLIENTS at the busiest hour, which is PEAK (UTC), and RATIO times fewer at the quietest "
        f"({', '.join(WILDCHAT_DAY)} have a PEAK and a RATIO of their own; others a RATIO of 8). No trace is read",
    )
    add("--system", default="pinyon", help=f"how load balancers route: {', '.join(SYSTEMS)} (default pinyon)")
    add("--routing", metavar="POLICY", help="replaces the system's routing policy: one that a load balancer has")
    add("--pushing", metavar="RULE", help="replaces the system's rule when a request may leave the queue")
    described = "; ".join(f"{name}: {text}" for name, text in WORKLOADS.items())
    add("--workload", default="wildchat", help=f"what clients send (default wildchat). {described}")
    add(
        "--round-trip",
        action="append",
        default=[],
        metavar="A+B=MS",
        help="of messages between two regions; repeatable (default: us+eu 90, us+asia 150, eu+asia 200, others 150)",
    )
    add_numbers(group, "--day", "--reserved", "--on-demand")


def check(arguments: argparse.Namespace) -> None:
    """Raises :class:`InvalidArgument` if an option is given that has no effect here."""
    if arguments.regions is None:
        return refuse_given(arguments, _OWN, "is of --regions")
    if arguments.trace is not None:
        raise InvalidArgument("--regions has clients of its own: no trace is read", field="trace")
    others = [name for name in vars(arguments) if name not in (*_OWN, *_ANY)]
    refuse_given(arguments, others, "says nothing where there are --regions")


def simulate(arguments: argparse.Namespace) -> int:
    """Runs a day and prints the results. Raises :class:`PinyonError`."""
    check_numbers(arguments)
    instances, courses = _regions(arguments.regions)
    system = _system(arguments, instances)
    world = _world(arguments, system, instances)
    warm_s, day_s = WARM_SHARE * arguments.day, arguments.day
    generators = {region: Random(f"{arguments.seed} {region}") for region in courses}
    made = sources(arguments.workload, list(courses), Random(f"{arguments.seed} {arguments.workload}"))
    for name, course in courses.items():
        wanted = lambda now_s, course=course: course.at(DAY_H * (now_s - warm_s) / day_s)  # noqa: E731 - of this one
        world.add_clients(name, made[name], generators[name], math.ceil(course.most), wanted)
    samples = Samples(world, warm_s)
    until_s = warm_s + day_s
    with bar("a day", round(until_s)) as progress:
        world.watch(lambda now_s: progress(round(now_s)))
        world.run(until_s)
    found: dict[str, Measured] = {}
    for name in (*courses, "all"):
        with suppress(ValueError):  # no request of that region has ended
            found[name] = measured(world, samples, warm_s, until_s, "" if name == "all" else name)
    if not found:
        raise InvalidArgument("no request has ended: the day is too short, or nobody sends any", field="day")
    loads = {name: course.slots() for name, course in courses.items()}
    per_instance = max(aggregate(list(loads.values()))) / sum(instances.values())
    day = costs(loads, per_instance, arguments.reserved, arguments.on_demand)
    if not arguments.json:
        console, table = results_console(), _table(f"{system.name}: a day", instances, courses, found)
        needed = console.measure(table, options=console.options.update(max_width=TABLE_WIDTH_MAX)).maximum
        Console(file=console.file, width=max(console.width, needed)).print(table)
        console.print(
            f"With {per_instance:.1f} clients for an instance: {day.region_local} reserved instances where each region "
            f"has its own, {day.region_local_dollars:,.2f} $/h; {day.shared} where they are shared, "
            f"{day.shared_dollars:,.2f} $/h ({day.saved:.1%} less); on demand, {day.on_demand_dollars:,.2f} $/h "
            f"({day.on_demand_ratio:.2f} times that).",
            highlight=False,
        )
    described = {
        "name": "simulate",
        "regions": {name: found[name].as_dict() if name in found else None for name in (*courses, "all")},
        "instances": instances,
        "system": system.name,
        "routing": system.policy,
        "pushing": system.pushing,
        "workload": arguments.workload,
        "seed": arguments.seed,
        "day_s": day_s,
        "counts": dict(world.counts),
        "clients_per_instance": per_instance,
        "costs": {**day._asdict(), "saved": day.saved, "on_demand_ratio": day.on_demand_ratio},
    }
    print_json(described)
    return 0


def _regions(text: str) -> tuple[dict[str, int], dict[str, DailyLoad]]:
    """Returns each region's instances, and the course of its clients over the day."""
    found: dict[str, int] = {}
    courses: dict[str, DailyLoad] = {}
    for part in text.split(","):
        name, *numbers = part.split(":")
        check_geographies((name,), "regions")
        if name in found:
            raise InvalidArgument(f"--regions: {name} is there twice", field="regions")
        if not 2 <= len(numbers) <= 4:
            raise InvalidArgument(f"--regions takes {FORM}, not {part!r}", field="regions")
        for number, most in zip(numbers, (INSTANCES_MAX, CLIENTS_MAX), strict=False):
            if not number.isdecimal() or int(number) > most:
                told = f"--regions takes {FORM}, with numbers from 0 to {most}, not {part!r}"
                raise InvalidArgument(told, field="regions")
        found[name], clients = map(int, numbers[:2])
        known = WILDCHAT_DAY.get(name)
        if known is None and len(numbers) < 3:
            raise InvalidArgument(
                f"--regions: when {name} has its peak is not known ({', '.join(WILDCHAT_DAY)} are): "
                f"{name}:{found[name]}:{clients}:HOUR",
                field="regions",
            )
        course = [0.0, 8.0] if known is None else [known.peak_h, known.ratio]
        course[: len(numbers) - 2] = [_number(part, each) for each in numbers[2:]]
        peak_h, ratio = course
        courses[name] = DailyLoad(peak_h, ratio, clients)
    if len(found) > REGIONS_MAX:
        raise InvalidArgument(f"--regions: at most {REGIONS_MAX}, not {len(found)}", field="regions")
    if not any(course.most for course in courses.values()):
        raise InvalidArgument("--regions: nobody has clients", field="regions")
    return found, courses


def _number(part: str, text: str, option: str = "--regions", what: str = "number") -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise InvalidArgument(f"{option}: {text!r} of {part!r} is no {what}", field=dest(option))
    return value


def _system(arguments: argparse.Namespace, regions: Mapping[str, int]) -> RoutingSystem:
    if arguments.system not in SYSTEMS:
        raise InvalidArgument(f"no system {arguments.system!r}; there are: {', '.join(SYSTEMS)}", field="system")
    system = SYSTEMS[arguments.system]
    if system.alone and system.alone not in regions:
        system = replace(system, alone=next(iter(regions)))
    asked = {"policy": arguments.routing, "pushing": arguments.pushing}
    changes = {key: value for key, value in asked.items() if value is not None}
    return replace(system, name=f"{system.name}, changed", **changes) if changes else system


def _world(arguments: argparse.Namespace, system: RoutingSystem, regions: Mapping[str, int]) -> RegionsWorld:
    machine = load_machine(
        WITH_MEMORY if arguments.model == REFERENCE else arguments.model
    )  # the default has no batches
    trips = {**ROUND_TRIPS_S}
    for text in arguments.round_trip:
        pair, equals, ms = text.partition("=")
        one, plus, other = pair.partition("+")
        if not equals or not plus or one not in regions or other not in regions or one == other:
            raise InvalidArgument(f"--round-trip takes A+B=MS of two of the regions, not {text!r}", field="round_trip")
        trips.pop((other, one), None)
        trips[one, other] = _number(text, ms, "--round-trip", "number of ms") / 1e3
    settings = WorldSettings(regions, trips)
    return RegionsWorld(settings, system, sglang_instance(machine), machine, load_profile(machine.engine))


def _table(
    title: str, instances: Mapping[str, int], courses: Mapping[str, DailyLoad], found: Mapping[str, Measured]
) -> Table:
    titles = ("clients of", "at the peak", "instances", "requests", "tokens/s", "TTFT P50, s", "P90", "E2E P50, s")
    table = results_table(title, *titles, "reused", "forwarded")
    for name in (*courses, "all"):
        each = found.get(name)
        size = (f"{courses[name].most:.0f}", f"{instances[name]}") if name in courses else ("", "")
        shown = () if each is None else (
            f"{each.requests:,}", f"{each.output_tokens_per_s:,.0f}", f"{each.ttft.p50:.2f}", f"{each.ttft.p90:.2f}",
            f"{each.e2e.p50:.1f}", f"{each.hits:.1%}", f"{each.forwarded:.1%}",
        )  # fmt: skip
        table.add_row(name, *size, *shown)
    return table
