"""``pinyon trace fit``: what a day's log says of reuse, for a policy to start the next day with."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from pinyon.cli.trace_analyze import GIB
from pinyon.cli.trace_input import add_trace, bar, open_trace, tell_broken
from pinyon.core.errors import InvalidArgument
from pinyon.traces.analysis import day_fits, read_columns

__all__ = ["add_command", "fit"]

_DESCRIPTION = """\
Fit an exponential to the reuse times of the trace's last 24 hours, by hour of the day and category (type and turn), as
"KVCache cache in the wild" does offline with the log of the last day (appendix A.1). The file is for the eviction
policy workload_aware:fits=FILE, in simulate-cache and in services."""


def add_command(commands: Any) -> None:
    """Register the command with the sub-parsers of ``pinyon trace``."""
    parser = commands.add_parser(
        "fit", help="fits of its last day's reuse, for workload_aware:fits=FILE", description=_DESCRIPTION
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
    parser.add_argument("--memory-gib", type=float, default=12.0, help="what it may take at most (default 12)")
    parser.set_defaults(run=fit)


def _seconds(text: str) -> float:
    """Of an option."""
    found = re.fullmatch(r"([01]?[0-9]|2[0-3]):([0-5][0-9])", text, re.ASCII)
    if found is None:
        raise argparse.ArgumentTypeError(f"not a time of day such as 10:00: {text!r}")
    return 3600.0 * int(found[1]) + 60.0 * int(found[2])


def fit(arguments: argparse.Namespace) -> int:
    """Read, fit and write. Raises :class:`PinyonError`."""
    if not 0 < arguments.memory_gib <= 1 << 20:
        raise InvalidArgument("--memory-gib must be above 0", field="memory_gib")
    trace = open_trace(arguments)
    with bar("reading", trace.size_bytes) as progress:
        columns = read_columns(
            trace.rows(arguments.limit),
            trace.format.block_tokens,
            int(arguments.memory_gib * GIB),
            lambda: progress(trace.read_bytes),
        )
    tell_broken(trace)
    with bar("counting", len(columns)) as progress:
        fits = day_fits(columns, arguments.begins, progress)
    if not fits:
        raise InvalidArgument(f"{trace.path}: too few blocks are used again for a fit in any hour", field="trace")
    described = {"name": "trace-fit", "trace": trace.path.name, "block_tokens": trace.format.block_tokens}
    try:
        arguments.out.write_text(json.dumps(described | fits.json(), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise InvalidArgument(f"{arguments.out}: {error.strerror}", field="out") from None
    count = sum(map(len, fits.hours.values()))
    result = described | {"hours": len(fits.hours), "fits": count, "broken_rows": trace.broken}
    sys.stdout.write(json.dumps(result) + "\n")
    return 0
