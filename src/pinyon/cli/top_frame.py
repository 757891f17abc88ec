"""The views of ``pinyon top`` as lines of text. Pure: two samples and the size of the terminal in, lines out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rich.text import Text

from pinyon.api.controller.v1 import controller_pb2
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


MEMBERS = (
    *(Column("REGION"), Column("LB"), Column("STATE"), Column("QUEUE", True), Column("FLIGHT", True)),
    *(Column("FREE", True), Column("HITS", True), Column("OUT/s", True), Column("IN/s", True), Column("SERVES")),
)
INSTANCES = (
    *(
        Column("LB"),
        Column("INSTANCE"),
        Column("PEND", True),
        Column("RUN", True),
        Column("SENT", True),
        Column("FREE"),
    ),
)
METRICS = (Column("METRIC"), Column("VALUE", True), Column("PER s", True))


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
    now: Mapping[str, float], before: Mapping[str, float] | None, seconds: float, width: int, height: int, title: str
) -> list[Text]:
    """Returns one process's own figures by name; those whose names end in ``_total`` also as a rate."""
    cells: list[tuple[str, ...]] = []
    for name, value in sorted(now.items()):
        rate = NOTHING
        if name.endswith("_total") and before is not None and name in before and seconds > 0:
            rate = f"{max(0.0, value - before[name]) / seconds:.1f}"
        cells.append((name, f"{value:g}", rate))
    return fit([Text(title, "bold"), *table(METRICS, cells, [""] * len(cells))], width, height)


def _members(now: Sample, before: Sample | None, federation: Federation) -> list[Text]:
    rows, styles = [], []
    reports = dict(now.reply.reports)
    last_reports = {} if before is None else dict(before.reply.reports)
    seconds = 0.0 if before is None else now.at_s - before.at_s
    for member in sorted(federation.members, key=lambda each: (each.info.region, each.info.lb_id)):
        lb_id = member.info.lb_id
        state = member.state.value
        if member.state is LbState.LIVE and not member.connected:
            state = "cut off"
        styles.append({LbState.FAILED: "red", LbState.LEFT: "dim", LbState.DRAINING: "yellow"}.get(member.state, ""))
        own = [each.name for each in federation.owned_by(lb_id)]
        others = [f"{each.region}/{each.name}*" for each in federation.adopted_by(lb_id)]
        serves = " ".join(own + others) if member.state is LbState.LIVE else ""
        report = reports.get(lb_id)
        if report is None:
            rows.append((member.info.region, lb_id, state, *[NOTHING] * 6, serves))
            continue
        load = report.load
        last = last_reports[lb_id].load if lb_id in last_reports else None
        rows.append(
            (
                *(member.info.region, lb_id, state, str(load.queue), str(load.in_flight)),
                f"{load.available_instances}/{load.instances}",
                _hits(load, last),
                _rate(load.forwarded_total, None if last is None else last.forwarded_total, seconds),
                _rate(load.accepted_total, None if last is None else last.accepted_total, seconds),
                serves,
            )
        )
    return table(MEMBERS, rows, styles)


def _hits(load: controller_pb2.LoadBalancerLoad, last: controller_pb2.LoadBalancerLoad | None) -> str:
    """Returns the share of hits since the last sample, or since the process's start if nothing was asked since."""
    hit, asked = load.hit_chunks_total, load.asked_chunks_total
    if last is not None and asked > last.asked_chunks_total:
        hit, asked = hit - last.hit_chunks_total, asked - last.asked_chunks_total
    return f"{min(1.0, max(0.0, hit / asked)):.0%}" if asked else NOTHING


def _rate(now: int, before: int | None, seconds: float) -> str:
    if before is None or seconds <= 0:
        return NOTHING
    return f"{max(0, now - before) / seconds:.1f}"  # a process that has started anew counts from zero


def _instances(reports: Mapping[str, controller_pb2.LoadBalancerReport]) -> list[Text]:
    found = [(each, lb_id) for lb_id, report in reports.items() for each in report.load.per_instance]
    found.sort(key=lambda pair: (-pair[0].pending, -pair[0].outstanding, pair[1], pair[0].name))
    rows = [
        (lb_id, each.name, *map(str, (each.pending, each.running, each.outstanding)), "yes" if each.available else "no")
        for each, lb_id in found
    ]
    return table(INSTANCES, rows, [""] * len(rows)) if rows else []


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]], styles: Sequence[str]) -> list[Text]:
    """Returns a head, and a line for each row."""
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
    return [head, *[Text(line(row), style) for row, style in zip(clean, styles, strict=True)]]


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
