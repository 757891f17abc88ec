"""What the commands that read traces share: the file, its broken rows, a progress bar."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from pinyon.core.errors import InvalidArgument
from pinyon_lab.traces import FORMATS, TraceFile
from pinyon_lab.traces.analysis import Columns, read_columns

MEMORY_GIB = (1e-6, float(1 << 20))
SEED_MAX = (1 << 64) - 1


def _count_rows(text: str) -> int:
    """Of an option."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"not a number of rows: {text!r}")
    return int(text)


def seed_of(text: str) -> int:
    """Of an option. A negative one would mean the same as the positive one."""
    if not text.isdecimal() or int(text) > SEED_MAX:
        raise argparse.ArgumentTypeError(f"not a whole number from 0 to 2^64 - 1: {text!r}")
    return int(text)


def add_trace(parser: Any, *, needed: bool = True) -> None:
    """The arguments that name a trace."""
    nargs = {} if needed else {"nargs": "?"}
    parser.add_argument("trace", type=Path, metavar="TRACE", help="a file, plain or gzipped", **nargs)
    parser.add_argument(
        "--format", default="", choices=tuple(FORMATS), help="of the file (default: its first row tells)"
    )
    parser.add_argument(
        "--limit", type=_count_rows, default=0, metavar="ROWS", help="read only so many rows (default: all)"
    )


def add_memory(parser: Any) -> None:
    """The argument of :func:`columns_of`."""
    parser.add_argument(
        "--memory-gib", type=float, default=12.0, metavar="GIB", help="memory that it may take (default 12)"
    )


def columns_of(arguments: argparse.Namespace, trace: TraceFile) -> Columns:
    """Read it, and say what was left out. Raises :class:`PinyonError`."""
    least, most = MEMORY_GIB
    if not least <= arguments.memory_gib <= most:
        raise InvalidArgument(f"--memory-gib must be from {least:g} to {most:,.0f}", field="memory_gib")
    with bar("reading", trace.size_bytes) as progress:
        columns = read_columns(
            trace.rows(arguments.limit),
            trace.format.block_tokens,
            int(arguments.memory_gib * (1 << 30)),
            lambda: progress(trace.read_bytes),
        )
    tell_broken(trace)
    return columns


def open_trace(arguments: argparse.Namespace, *, blocks: bool = True) -> TraceFile:
    """As :func:`open_file`, as the arguments name it."""
    return open_file(arguments.trace, arguments.format, blocks=blocks)


def open_file(path: Path, name: str = "", *, blocks: bool = True) -> TraceFile:
    """``name``: of its format, empty: its first row tells. ``blocks``: one without is of no use. Raises
    :class:`PinyonError`."""
    trace = TraceFile(path, name)
    if blocks and not trace.format.block_tokens:
        raise InvalidArgument(f"{trace.path}: a trace of format {trace.format.name} has no blocks", field="trace")
    return trace


def tell_broken(trace: TraceFile) -> None:
    """On stderr, what was left out."""
    if trace.broken:
        sys.stderr.write(f"pinyon: {trace.broken} broken rows of {trace.path} were left out:\n")
        for reason in trace.reasons:
            sys.stderr.write(f"  {reason}\n")
        if trace.broken > len(trace.reasons):
            sys.stderr.write("  ...\n")


@contextmanager
def bar(text: str, total: int) -> Iterator[Callable[[int], None]]:
    """On stderr, where that is a terminal; it is told how much is done."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(text, total=total)
        yield lambda done: progress.update(task, completed=done)
