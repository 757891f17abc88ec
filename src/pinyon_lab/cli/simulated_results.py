"""The results of a run, as the commands that simulate print, draw and write them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from pinyon_lab.cli.trace_input import write_text
from pinyon_lab.pictures import Course, Courses, Picture, svg
from pinyon_lab.simulator.models import Limits, Rows

POINTS = 200
"""The number of points of a curve in a picture."""
_FACTS = (
    ("requests that count", "counted", "{:,}"),
    ("rate, requests/s", "rate", "{:.4g}"),
    ("TTFT in time", "attainment", "{:.2%}"),
    ("  of the last quarter by arrival", "attainment_last_quarter", "{:.2%}"),
    ("  of the tenth with the longest prompts", "attainment_longest_tenth", "{:.2%}"),
    ("TTFT mean, s", "mean_s", "{:.3f}"),
    ("TTFT P50, s", "p50_s", "{:.3f}"),
    ("TTFT P90, s", "p90_s", "{:.3f}"),
    ("TTFT P99, s", "p99_s", "{:.3f}"),
    ("tokens reused", "hit_ratio", "{:.2%}"),
    ("tokens fetched", "fetched_ratio", "{:.2%}"),
    ("TBT P50, ms", "tbt_p50_s", "{:.1f}"),
    ("TBT P90, ms", "tbt_p90_s", "{:.1f}"),
    ("TBT in time", "tbt_attainment", "{:.2%}"),
    ("effective: both in time", "effective", "{:.2%}"),
    ("instances that computed prompts", "instances_used", "{:.0f}"),
    ("finished", "finished", "{:.2%}"),
    ("end to end mean, s", "e2e_mean_s", "{:.2f}"),
    ("tokens generated per s", "output_tokens_per_s", "{:,.0f}"),
)
_COLUMNS = (
    ("in time", "attainment", "{:.1%}", "share of the requests whose TTFT is"),
    ("last ¼", "attainment_last_quarter", "{:.1%}", "of the last quarter by arrival"),
    ("longest", "attainment_longest_tenth", "{:.1%}", "of the tenth with the longest prompts"),
    ("P50", "p50_s", "{:.2f}", "of the TTFT in s, as P90 and P99"),
    ("P90", "p90_s", "{:.2f}", ""),
    ("P99", "p99_s", "{:.2f}", ""),
    ("reused", "hit_ratio", "{:.1%}", "share of the prompts' tokens"),
    ("both", "effective", "{:.1%}", "TTFT and TBT in time"),
)
"""The columns of a comparison, and the legend of each."""


def write_rows(path: Path, rows: Iterable[tuple[int, Any]]) -> None:
    """Writes a line of JSON for each row, with its number in the trace. Raises :class:`InvalidArgument`."""
    lines = (json.dumps({"request": number, **each._asdict()}) + "\n" for number, each in rows)
    write_text(path, "".join(lines), "per_request")


def draw(path: Path, title: str, rows: dict[str, Rows], limits: Limits) -> None:
    """Writes an SVG of the share of requests that have their first token by a time. Raises :class:`InvalidArgument`."""
    courses = []
    for label, each in rows.items():
        times = sorted(row.ttft_s for row in each[limits.warm_up :] if row.ttft_s > 0)
        count = len(each) - limits.warm_up
        places = sorted({round(at * (len(times) - 1) / POINTS) for at in range(POINTS + 1)}) if times else []
        courses.append(Course(label, [(times[at], (at + 1) / count) for at in places]))
    panel = Courses("Time to the first token", "TTFT, s", "of the requests by then", courses)
    write_text(path, svg(Picture(title, [panel])), "picture")


def print_result(title: str, result: Mapping[str, Any]) -> None:
    """Prints a line for each figure."""
    table = Table(title=title, title_justify="left", show_header=False)
    for label, key, shown in _FACTS:
        if key in result:
            table.add_row(label, shown.format(result[key] * (1e3 if label.endswith(", ms") else 1)))
    _print(table)


def print_side_by_side(title: str, first: str, results: Mapping[str, Mapping[str, Any]]) -> None:
    """Prints a line for each result; ``first`` is the title of the column with their names."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column(first, no_wrap=True)
    shown = [column for column in _COLUMNS if any(column[1] in result for result in results.values())]
    for label, *_ in shown:
        table.add_column(label, justify="right", no_wrap=True)
    for name, result in results.items():
        table.add_row(name, *(form.format(result[key]) if key in result else "" for _, key, form, _ in shown))
    table.caption = "; ".join(f"{label}: {told}" for label, _, _, told in shown if told)
    table.caption_justify = "left"
    _print(table)


def _print(table: Table) -> None:
    Console(file=sys.stderr if not sys.stdout.isatty() else sys.stdout).print(table)
