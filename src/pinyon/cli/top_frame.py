"""The views of ``pinyon top`` as lines of text. Pure: two samples and the size of the terminal in, lines out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from typing import NamedTuple

from rich.text import Text

from pinyon.api.controller.v1 import controller_pb2
from pinyon.cli.regions import served
from pinyon.federation.members import LbState
from pinyon.federation.view import Federation
from pinyon.messages.federation import federation_from_proto

LEAST_WIDTH = 20
LEAST_HEIGHT = 4
NOTHING = "-"


class Sample(NamedTuple):
    """The controller's reply at ``at_s`` by a monotonic clock."""

    at_s: float
    reply: controller_pb2.ListRegionsResponse


class Column(NamedTuple):
    title: str
    right: bool = False
    least: int = 0
    """The least width in characters, so that a table of changing values stands still."""


def words(*titles: str) -> tuple[Column, ...]:
    return tuple(Column(title) for title in titles)


def numbers(*titles: str, least: int = 0) -> tuple[Column, ...]:
    return tuple(Column(title, True, least) for title in titles)


MEMBERS = (
    *words("REGION", "LB", "STATE"),
    *numbers("QUEUE", "FLIGHT", "FREE", "HITS", "OUT/s", "IN/s"),
    *words("SERVES"),
)
INSTANCES = (*words("LB", "INSTANCE"), *numbers("PEND", "RUN", "SENT"), *words("FREE"))
METRICS = (*words("METRIC"), *numbers("VALUE", "PER s"))


def controller_frame(now: Sample, before: Sample | None, width: int, height: int, title: str) -> list[Text]:
    """Returns regions, load balancers, and as many instances as there is room for, the busiest first."""
    federation = federation_from_proto(now.reply.federation)
    live = sum([member.state is LbState.LIVE for member in federation.members])
    adopted = sum([bool(cluster.adopter) for cluster in federation.clusters])
    settling = ", settling" if now.reply.settling else ""
    head = (
        f"{title}  version {federation.version}: {_count(len(federation.regions), 'region')}, "
        f"{live} of {_count(len(federation.members), 'load balancer')} live, {adopted} adopted{settling}"
    )
    lines = [Text(head, "bold"), *_members(now, before, federation)]
    instances = _instances(now.reply.reports)
    if instances:
        lines += [Text(""), *instances]
    return fit(lines, width, height)


def metrics_frame(
    now: Mapping[str, float], before: Mapping[str, float], seconds: float, width: int, height: int, title: str
) -> list[Text]:
    """Returns one process's own figures by name; those whose names end in ``_total`` also as a rate."""
    rows = []
    for name, value in sorted(now.items()):
        counted = name in before and name.endswith("_total")
        rows.append((name, f"{value:g}", per_second(value - before[name], seconds) if counted else NOTHING))
    return fit([Text(title, "bold"), *table(METRICS, rows)], width, height)


def _members(now: Sample, before: Sample | None, federation: Federation) -> list[Text]:
    rows, styles = [], []
    before = before or now
    for member in sorted(federation.members, key=lambda each: (each.info.region, each.info.lb_id)):
        lb_id = member.info.lb_id
        state = member.state.value
        if member.state is LbState.LIVE and not member.connected:
            state = "cut off"
        styles.append({LbState.FAILED: "red", LbState.LEFT: "dim", LbState.DRAINING: "yellow"}.get(member.state, ""))
        serves = served(federation, lb_id) if member.state is LbState.LIVE else ""
        if lb_id not in now.reply.reports:
            rows.append((member.info.region, lb_id, state, *[NOTHING] * 6, serves))
            continue
        load = now.reply.reports[lb_id].load
        seconds, last = 0.0, load
        if lb_id in before.reply.reports:
            seconds, last = now.at_s - before.at_s, before.reply.reports[lb_id].load
        rows.append(
            (
                *(member.info.region, lb_id, state, str(load.queue), str(load.in_flight)),
                f"{load.available_instances}/{load.instances}",
                _hits(load, last),
                per_second(load.forwarded_total - last.forwarded_total, seconds),
                per_second(load.accepted_total - last.accepted_total, seconds),
                serves,
            )
        )
    return table(MEMBERS, rows, styles)


def _hits(load: controller_pb2.LoadBalancerLoad, last: controller_pb2.LoadBalancerLoad) -> str:
    """Returns the share of hits since the last sample, or since the process's start if nothing was asked since."""
    hit, asked = load.hit_chunks_total, load.asked_chunks_total
    if asked > last.asked_chunks_total:
        hit, asked = hit - last.hit_chunks_total, asked - last.asked_chunks_total
    return share(hit, asked)


def share(part: float, whole: float) -> str:
    return f"{min(1.0, max(0.0, part / whole)):.0%}" if whole > 0 else NOTHING


def per_second(grown: float, seconds: float) -> str:
    """Returns the rate of a counter, which is below its last value when its process has started anew."""
    return f"{max(0.0, grown) / seconds:.1f}" if seconds > 0 else NOTHING


def _instances(reports: Mapping[str, controller_pb2.LoadBalancerReport]) -> list[Text]:
    found = [(each, lb_id) for lb_id, report in reports.items() for each in report.load.per_instance]
    found.sort(key=lambda pair: (-pair[0].pending, -pair[0].outstanding, pair[1], pair[0].name))
    rows = [
        (lb_id, each.name, *map(str, (each.pending, each.running, each.outstanding)), "yes" if each.available else "no")
        for each, lb_id in found
    ]
    return table(INSTANCES, rows) if rows else []


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]], styles: Iterable[str] = repeat("")) -> list[Text]:
    """Returns a head, and a line for each row in its style."""
    clean = [[plain(cell) for cell in row] for row in rows]
    widths = [
        max([column.least, len(column.title), *[len(row[place]) for row in clean]])
        for place, column in enumerate(columns)
    ]

    def line(cells: Sequence[str]) -> str:
        parts = [
            cell.rjust(width) if column.right else cell.ljust(width)
            for cell, width, column in zip(cells, widths, columns, strict=True)
        ]
        return "  ".join(parts).rstrip()

    head = Text(line([column.title for column in columns]), "dim")
    return [head, *[Text(line(row), style) for row, style in zip(clean, styles, strict=False)]]


def plain(text: str) -> str:
    """Returns text from outside so that nothing in it moves the cursor and each character is one cell wide."""
    return "".join([each if " " <= each <= "~" else "?" for each in text])


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def fit(lines: Sequence[Text], width: int, height: int) -> list[Text]:
    """Returns the lines that fit the terminal: none is wider, and there are no more than it has."""
    width, height = max(LEAST_WIDTH, width), max(LEAST_HEIGHT, height)
    shown = list(lines)
    if len(shown) > height:
        left = len(shown) - height + 1
        shown = [*shown[: height - 1], Text(f"... {left} more", "dim")]
    return [Text(_clipped(plain(line.plain), width), line.style, no_wrap=True, overflow="crop") for line in shown]


def _clipped(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + ">"
