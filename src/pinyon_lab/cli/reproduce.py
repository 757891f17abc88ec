"""The command ``pinyon reproduce``, which makes a paper's figure again, with our numbers beside its text."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pinyon.core.errors import InvalidArgument, NotFound
from pinyon.core.near import did_you_mean
from pinyon_lab.cli.trace_input import open_trace, print_json, reading, write_files
from pinyon_lab.papers import ELSEWHERE, FIGURES, NOT_MADE, SOURCES, Basis, Figure, Result, Workload
from pinyon_lab.pictures import svg

_DESCRIPTION = """\
Make a figure of a paper again: a table of our numbers and, beside what the paper's text says, what we find. Only
numbers that are printed there count as the paper's. Traces do not come with pinyon: --traces names a folder that has
them under the names that --list shows (plain or gzipped), --trace a single one."""

GENERATED = " *"
MODELLED = " ~"
SUFFIXES = (".jsonl.gz", ".jsonl")
TABLE_WIDTH_MAX = 200
"""The largest width that a table takes. A narrower terminal breaks the lines; nothing is cut off."""


def add_command(commands: Any) -> None:
    parser = commands.add_parser("reproduce", help="make a paper's figure again", description=_DESCRIPTION)
    add = parser.add_argument
    add("figure", nargs="?", metavar="NAME", help="the figure's name: see --list")
    add(
        "--list",
        action="store_true",
        help="list all figures, the traces that they need, those that other commands make, and those that are not made",
    )
    add("--traces", type=Path, metavar="FOLDER", help="the folder of the traces, under the names that --list shows")
    add("--trace", action="append", default=[], metavar="NAME=FILE", help="read this trace from this file; repeatable")
    add(
        "--quick",
        action="store_true",
        help="shorter and fewer runs with rough numbers; only for figures that are simulated",
    )
    add("--out", type=Path, metavar="FOLDER", help="write NAME.json and NAME.svg there")
    add("--json", action="store_true", help="print nothing but one JSON object")
    parser.set_defaults(run=reproduce)


def reproduce(arguments: argparse.Namespace) -> int:
    """Makes the figure and prints it. Raises :class:`PinyonError`."""
    if arguments.list:
        _list(arguments.json)
        return 0
    if arguments.figure in ELSEWHERE:
        raise InvalidArgument(f"{arguments.figure} is made by `{ELSEWHERE[arguments.figure].command}`", field="figure")
    if arguments.figure not in FIGURES:
        wrong = "a figure's name is needed"
        if arguments.figure is not None:
            wrong = f"no figure {arguments.figure!r}{did_you_mean(arguments.figure, FIGURES)}"
        raise InvalidArgument(f"{wrong}; there are: {', '.join(FIGURES)}", field="figure")
    figure = FIGURES[arguments.figure]
    if arguments.quick and not figure.has_quick_way:
        quick = ", ".join(each.name for each in FIGURES.values() if each.has_quick_way)
        raise InvalidArgument(f"{figure.name} has no quick way; these have: {quick}", field="quick")
    files = _files(figure, arguments.traces, arguments.trace)
    workloads = [_read(name, path) for name, path in files.items()]
    with Console(stderr=True).status("reading") as status:
        result = figure.make(workloads, status.update, time.thread_time_ns, quick=arguments.quick)
    described = {
        "name": "reproduce",
        "figure": figure.name,
        "paper": figure.paper,
        "section": figure.section,
        "workloads": {each.name: {"requests": len(each.rows), "generated": each.generated} for each in workloads},
        **result.as_json(),
    }
    if arguments.out is not None:
        texts = {"json": json.dumps(described, indent=1) + "\n", "svg": svg(result.picture)}
        write_files(arguments.out, {f"{figure.name}.{kind}": text for kind, text in texts.items()})
    if arguments.json:
        print_json(described)
    else:
        _show(figure, result)
    return 0


def _files(figure: Figure, folder: Path | None, named: list[str]) -> dict[str, Path]:
    """Returns the files of the figure's workloads. Raises :class:`PinyonError` that says what is missing."""
    given: dict[str, Path] = {}
    for text in named:
        name, equals, path = text.partition("=")
        if not equals or not path or name not in (*figure.needs, *figure.likes):
            known = ", ".join((*figure.needs, *figure.likes))
            raise InvalidArgument(f"--trace takes NAME=FILE with one of {known}, got {text!r}", field="trace")
        given[name] = Path(path)
    if folder is not None and not folder.is_dir():
        raise NotFound(f"no folder of traces at {folder}", field="traces")
    for name in (*figure.needs, *figure.likes):
        candidates = [folder / f"{SOURCES[name].stem}{suffix}" for suffix in SUFFIXES] if folder else []
        found = next((path for path in candidates if path.is_file()), None)
        if name not in given and found is not None:
            given[name] = found
    missing = [name for name in figure.needs if name not in given]
    if missing:
        wanted = ", ".join(f"{name} ({SOURCES[name].stem}.jsonl[.gz])" for name in missing)
        raise NotFound(
            f"{figure.name} needs traces that are not there: {wanted}; give --traces FOLDER or --trace NAME=FILE",
            field="traces",
        )
    return {name: given[name] for name in (*figure.needs, *figure.likes) if name in given}


def _read(name: str, path: Path) -> Workload:
    trace = open_trace(path)
    with reading(trace, f"reading {name}") as progress:
        rows = trace.sorted_rows(0, progress)
    if not rows:
        raise InvalidArgument(f"{path} has no rows that can be read", field="trace")
    generated = SOURCES[name].generated and any(row.user for row in rows)  # the published traces name no users
    return Workload(name, rows, trace.format.block_tokens, generated)


def _show(figure: Figure, result: Result) -> None:
    console = Console()
    table = Table(
        title=f"{figure.paper}, {figure.section}: {figure.title}", title_justify="left", box=None, pad_edge=False
    )
    for column in result.columns:
        mark = MODELLED * (column.basis is Basis.MODELLED)
        table.add_column(column.title + mark, justify="right" if column.form else "left", no_wrap=bool(column.form))
    for row in result.rows:
        values = ((row[column.key], column.form) for column in result.columns)
        first, *others = ("–" if value is None else format(value, form) for value, form in values)
        table.add_row(first + GENERATED * (row.get("basis") == Basis.CONSTRUCTION), *others)
    needed = console.measure(table, options=console.options.update(max_width=TABLE_WIDTH_MAX)).maximum
    Console(width=max(console.width, needed)).print(table)
    if any(column.basis is Basis.MODELLED for column in result.columns):
        console.print(f"{MODELLED.strip()} {Basis.MODELLED}: a formula stands in for a machine", highlight=False)
    if any(row.get("basis") == Basis.CONSTRUCTION for row in result.rows):
        console.print(f"{GENERATED.strip()} {Basis.CONSTRUCTION}: a generated workload", highlight=False)
    for claim in result.claims:
        printed = "not printed" if claim.printed is None else f"{claim.printed}"
        said = f'\n{claim.section}: "{claim.said}"'
        found = f"  paper: {printed}   ours: {claim.ours} ({claim.basis})   {claim.verdict}"
        console.print(said, found, f"  {claim.why}", sep="\n", highlight=False, markup=False)
    for note in result.notes:
        console.print(f"\n{note}", highlight=False, markup=False)


def _list(as_json: bool) -> None:
    if as_json:
        told = ("name", "paper", "section", "title", "needs", "likes")
        named = [{key: getattr(each, key) for key in told} for each in FIGURES.values()]
        elsewhere = [each._asdict() for each in ELSEWHERE.values()]
        not_made = [each._asdict() for each in NOT_MADE]
        print_json({"figures": named, "elsewhere": elsewhere, "not_made": not_made})
        return
    console = Console()
    made = []
    for each in FIGURES.values():
        likes = f" ({', '.join(each.likes)})" if each.likes else ""
        made.append((each.name, f"{each.paper} {each.section}", each.title, ", ".join(each.needs) + likes))
    files = [(name, f"{source.stem}.jsonl[.gz]", source.text) for name, source in SOURCES.items()]
    others = [
        (other.name, f"{other.paper} {other.section}", other.title, other.command) for other in ELSEWHERE.values()
    ]
    _table(console, ("figure", "of", "shows", "traces (it can do without)"), made)
    _table(console, ("trace", "file", "is"), files)
    _table(console, ("made elsewhere", "of", "shows", "by"), others)
    _table(console, ("not made, of", "figures", "why"), NOT_MADE)


def _table(console: Console, titles: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    table = Table(*titles, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*map(escape, row))
    console.print(table)
    console.print()
