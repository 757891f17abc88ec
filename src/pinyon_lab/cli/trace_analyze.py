"""The commands ``pinyon trace analyze`` and ``fit``: what a trace's requests reuse, for people and for a policy."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from pinyon.core.errors import InvalidArgument
from pinyon_lab.cli.numbers import add_numbers, check_numbers
from pinyon_lab.cli.trace_input import add_trace, bar, columns_of, open_trace, print_json, write_files, write_text
from pinyon_lab.pictures import Picture, svg
from pinyon_lab.traces.analysis import FIGURES, TraceFigure, analyse, checked_figures, day_fits
from pinyon_lab.traces.analysis.figure import AnalysisTable

_DESCRIPTION = """\
Section 3 of "KVCache cache in the wild" for any trace: ideal hit ratio, users, turns, reuse times and their fits, where
in a prompt the reused blocks are, lifespans, sizes, capacity; and DualMap's Fig. 14. A hit is a block of the longest
leading run that earlier requests had, in a cache that forgets nothing. Blocks are those of the trace: ids of 512 tokens
cannot be cut to smaller ones."""

_FIT = """\
Fit an exponential to the reuse times of the trace's last 24 hours, by hour of the day and category (type and turn), as
"KVCache cache in the wild" does offline with the log of the last day (appendix A.1). The file is for the eviction
policy workload_aware:fits=FILE, in simulate-cache and in services."""

ROWS_SHOWN = 24
COLUMNS_SHOWN = 12


def add_command(commands: Any) -> None:
    parser = commands.add_parser("analyze", help="what its requests reuse, figure by figure", description=_DESCRIPTION)
    add_trace(parser)
    parser.add_argument(
        "--figure",
        default="",
        metavar="N,...",
        help=f"only these: {', '.join(FIGURES[:3])} ... {', '.join(FIGURES[-2:])}",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write analysis.json and the pictures there")
    add_numbers(parser, "--window-s", "--memory-gib")
    parser.set_defaults(run=analyze)


def analyze(arguments: argparse.Namespace) -> int:
    """Reads the trace, counts and shows the figures. Raises :class:`PinyonError`."""
    check_numbers(arguments)
    names = checked_figures([name for name in arguments.figure.split(",") if name])
    trace = open_trace(arguments.trace, arguments.format, blocks=False)
    columns = columns_of(arguments, trace)
    with bar("counting", len(columns)) as progress:
        figures = analyse(columns, names, arguments.window_s, progress)
    result = {
        "name": "trace-analyze",
        "trace": trace.path.name,
        "format": trace.format.name,
        "block_tokens": trace.format.block_tokens,
        "requests": len(columns),
        "duration_s": float(columns.time_s[-1] - columns.time_s[0]),
        "broken_rows": trace.broken,
        "broken_reasons": trace.reasons,
        "figures": [figure.json() for figure in figures],
    }
    if arguments.out:
        files = {"analysis.json": json.dumps(result, indent=1) + "\n"}
        for figure in figures:
            if figure.plots:
                name = figure.number if "-" in figure.number else f"fig{figure.number}"
                files[f"{name}.svg"] = svg(Picture(_title(figure), figure.plots))
        write_files(arguments.out, files)
    if arguments.json:
        print_json(result)
    else:
        _show(figures)
    return 0


def _title(figure: TraceFigure) -> str:
    return f"Fig. {figure.number}: {figure.title}" if "-" not in figure.number else figure.title


def _show(figures: Sequence[TraceFigure]) -> None:
    console = Console(markup=False, highlight=False)  # the types of requests may be any text
    for figure in figures:
        if figure.left_out:
            console.print(f"{_title(figure)}: left out, {figure.left_out}\n")
            continue
        console.print(_title(figure), style="bold")
        if figure.facts:
            heads = ("", Column("this trace", justify="right"), "the paper prints")
            printed = any(each.paper for each in figure.facts)
            facts = Table(*heads, box=None, pad_edge=False, show_header=printed)
            for each in figure.facts:
                facts.add_row(each.column.label, each.column.shown(each.value), each.paper)
            console.print(facts)
        for table in figure.tables:
            _show_table(console, table)
        for note in figure.notes:
            console.print(note, style="dim")
        console.print()


def _show_table(console: Console, table: AnalysisTable) -> None:
    if len(table.columns) > COLUMNS_SHOWN:
        return
    shown = Table(title=table.title, title_justify="left", box=None, pad_edge=False, title_style="italic")
    for at, column in enumerate(table.columns):
        text = any(isinstance(row[at], str) for row in table.rows)
        shown.add_column(column.label or column.key, justify="left" if text else "right")
    every = -(-len(table.rows) // ROWS_SHOWN)
    for row in table.rows[::every]:
        shown.add_row(*(column.shown(value) for column, value in zip(table.columns, row, strict=True)))
    console.print(shown)
    if every > 1:
        console.print(f"one row in {every}; all {len(table.rows)} are in the JSON", style="dim")


def add_fit(commands: Any) -> None:
    parser = commands.add_parser(
        "fit", help="fit the reuse of its last day, for workload_aware:fits=FILE", description=_FIT
    )
    add_trace(parser)
    parser.add_argument("out", type=Path, metavar="OUT", help="the file (JSON)")
    parser.add_argument(
        "--begins",
        type=_seconds,
        default=0.0,
        metavar="H:MM",
        help="the time of day of the trace's zero (default 0:00); UTC where the file is for services",
    )
    add_numbers(parser, "--memory-gib")
    parser.set_defaults(run=fit)


def _seconds(text: str) -> float:
    """Returns the seconds of a time of day such as ``10:00``."""
    found = re.fullmatch(r"([01]?[0-9]|2[0-3]):([0-5][0-9])", text, re.ASCII)
    if found is None:
        raise argparse.ArgumentTypeError(f"not a time of day such as 10:00: {text!r}")
    return 3600.0 * int(found[1]) + 60.0 * int(found[2])


def fit(arguments: argparse.Namespace) -> int:
    """Reads the trace, fits and writes the file. Raises :class:`PinyonError`."""
    trace = open_trace(arguments.trace, arguments.format)
    columns = columns_of(arguments, trace)
    with bar("counting", len(columns)) as progress:
        fits = day_fits(columns, arguments.begins, progress)
    if not fits:
        raise InvalidArgument(f"{trace.path}: too few blocks are used again for a fit in any hour", field="trace")
    described = {"name": "trace-fit", "trace": trace.path.name, "block_tokens": trace.format.block_tokens}
    write_text(arguments.out, json.dumps(described | fits.json(), indent=1) + "\n", "out")
    count = sum(map(len, fits.hours.values()))
    print_json(described | {"hours": len(fits.hours), "fits": count, "broken_rows": trace.broken})
    return 0
