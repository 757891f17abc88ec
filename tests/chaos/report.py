"""The results of the fault tests as a table for people, as Markdown for the docs, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.chaos.evidence import machine
from tests.chaos.leaving import LEFT_S, Leaving
from tests.chaos.memory import GROWTH_MAX, WARM_SHARE, Growth
from tests.chaos.rows import GAP_S, WORST_S, Row
from tests.chaos.run_faults import FaultResult

HEADS = ("service", "fault", "size", "requests", "failed", "only copy", "gap s", "worst s", "calm s", "load", "others")


def cells(result: FaultResult, row: Row) -> list[str]:
    return [
        f"{row.victim} ({row.configuration})",
        row.fault,
        row.size,
        str(row.requests),
        str(row.failed),
        str(row.only_copy),
        *(_seconds(value) for value in (row.gap_s, row.worst_s, row.calm_s)),
        f"{result.load:g}",
        f"{result.others:.0%}",
    ]


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def show_faults(console: Console, results: Sequence[FaultResult]) -> None:
    table = Table(title=f"Faults (limits: failed 0, gap {GAP_S:g} s, worst {WORST_S:g} s)", title_justify="left")
    for number, head in enumerate(HEADS):
        table.add_column(head, justify="left" if number < 3 else "right", no_wrap=True)
    for result in results:
        for row in result.rows:
            table.add_row(*cells(result, row), style=None if row.good else "red")
    console.print(table)
    for result in results:
        for text in (
            *result.problems,
            *(f"left on an idle cluster: {result.left}" for _ in range(bool(result.left))),
            *(f"{row.size}: {detail}" for row in result.rows for detail in row.details),
            *(f"see {result.evidence}" for _ in range(bool(result.evidence))),
        ):
            console.print(f"{result.victim} {result.fault}: {text}", markup=False, highlight=False, soft_wrap=True)


def markdown(results: Sequence[FaultResult]) -> str:
    lines = [f"| {' | '.join(HEADS)} |", "|---|---|---|" + "---:|" * (len(HEADS) - 3)]
    lines += [f"| {' | '.join(cells(result, row))} |" for result in results for row in result.rows]
    return "\n".join(lines) + "\n"


def show_leaving(console: Console, results: Sequence[Leaving]) -> None:
    table = Table(title=f"Clients that leave: seconds until each hop works for nobody (limit {LEFT_S:g} s)")
    hops = list(results[0].noticed_s) if results else []
    for head in ("bytes", "moment", *hops, "others"):
        table.add_column(head, justify="left" if head == "moment" else "right", no_wrap=True)
    for each in results:
        times = ("never" if time is None else f"{time:.2f}" for time in each.noticed_s.values())
        table.add_row(
            f"{each.size_bytes:,}", each.moment, *times, f"{each.others:.0%}", style=None if each.good else "red"
        )
    console.print(table)


def show_growth(console: Console, growths: Sequence[Growth]) -> None:
    limit = f"limit {100 * GROWTH_MAX:g} % per 10,000 requests, after the first {100 * WARM_SHARE:g} %"
    table = Table(title=f"Resident memory ({limit})", title_justify="left")
    for head in ("process", "warm MiB", "end MiB", "bytes a request", "% per 10,000", "open files"):
        table.add_column(head, justify="left" if head == "process" else "right", no_wrap=True)
    for each in growths:
        sizes = (f"{value / 2**20:.1f}" for value in (each.warm_bytes, each.last_bytes))
        files = f"{each.files[0]} → {each.files[1]}"
        slope = f"{each.bytes_per_request:.0f}"
        table.add_row(each.name, *sizes, slope, f"{100 * each.per_10k:.2f}", files, style=None if each.good else "red")
    console.print(table)


def write_json(path: Path, name: str, seed: str, **parts: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"name": name, "seed": seed, "machine": machine(), **parts}, indent=2) + "\n")
