"""Shared parts of the commands that read traces: the file, its broken rows, a progress bar, and output."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from pinyon.core.errors import InvalidArgument
from pinyon_lab.cli.numbers import check_numbers
from pinyon_lab.traces import FORMATS, TraceFile
from pinyon_lab.traces.analysis import TraceColumns, read_columns


def whole(what: str, least: int = 0, most: float = math.inf) -> Callable[[str], int]:
    """Returns the type of an option that is a whole number."""

    def parsed(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"not {what}: {text!r}")
        return int(text)

    return parsed


def positive(what: str, most: float) -> Callable[[str], float]:
    """Returns the type of an option that is a number above 0."""

    def parsed(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if not 0 < value <= most:
            raise argparse.ArgumentTypeError(f"not {what}: {text!r}")
        return value

    return parsed


seed_of = whole("a whole number from 0 to 2^64 - 1", most=(1 << 64) - 1)
"""The type of an option that is a seed; a negative one would mean the same as the positive one."""


def add_trace(parser: Any, *, needed: bool = True) -> None:
    nargs = {} if needed else {"nargs": "?"}
    parser.add_argument("trace", type=Path, metavar="TRACE", help="a file, plain or gzipped", **nargs)
    parser.add_argument(
        "--format", default="", choices=tuple(FORMATS), help="the file's format (default: its first row tells)"
    )
    parser.add_argument(
        "--limit",
        type=whole("a number of rows"),
        default=0,
        metavar="ROWS",
        help="read only so many rows (default: all)",
    )


def columns_of(arguments: argparse.Namespace, trace: TraceFile) -> TraceColumns:
    """Reads the trace within ``--memory-gib`` and reports broken rows. Raises :class:`PinyonError`."""
    check_numbers(arguments)
    with reading(trace) as progress:
        rows = trace.rows(arguments.limit, progress)
        return read_columns(rows, trace.format.block_tokens, int(arguments.memory_gib * (1 << 30)))


def open_trace(path: Path, name: str = "", *, blocks: bool = True) -> TraceFile:
    """Opens a trace file in the format ``name``; empty: the first row tells the format.

    With ``blocks``, a format without blocks is an error. Raises :class:`PinyonError`."""
    trace = TraceFile(path, name)
    if blocks and not trace.format.block_tokens:
        raise InvalidArgument(f"{trace.path}: a trace of format {trace.format.name} has no blocks", field="trace")
    return trace


@contextmanager
def bar(text: str, total: int) -> Iterator[Callable[[int], None]]:
    """Shows a progress bar on stderr, if that is a terminal; yields a function that takes the amount done so far."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(text, total=total)
        yield lambda done: progress.update(task, completed=done)


@contextmanager
def reading(trace: TraceFile, text: str = "reading") -> Iterator[Callable[[int], None]]:
    """Shows a progress bar while a trace is read, and then reports on stderr the broken rows that were left out."""
    with bar(text, trace.size_bytes) as progress:
        yield progress
    if trace.broken:
        sys.stderr.write(f"pinyon: {trace.broken} broken rows of {trace.path} were left out:\n")
        for reason in trace.reasons:
            sys.stderr.write(f"  {reason}\n")
        if trace.broken > len(trace.reasons):
            sys.stderr.write("  ...\n")


def print_json(result: Mapping[str, Any]) -> None:
    """Writes a line of JSON to standard output."""
    sys.stdout.write(json.dumps(result) + "\n")


def write_text(path: Path, text: str, field: str) -> None:
    """Writes the text to the file. Raises :class:`InvalidArgument`."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidArgument(f"cannot write {path}: {error.strerror}", field=field) from None


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Writes texts under their names into the folder of ``--out``. Raises :class:`InvalidArgument`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidArgument(f"cannot write to {folder}: {error.strerror}", field="out") from None
