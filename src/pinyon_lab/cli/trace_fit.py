"""The command ``pinyon trace fit``: the reuse in a day's log, for a policy to start the next day with."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from pinyon.core.errors import InvalidArgument
from pinyon_lab.cli.trace_input import add_memory, add_trace, bar, columns_of, open_trace, print_json, write_text
from pinyon_lab.traces.analysis import day_fits

_DESCRIPTION = """\
Fit an exponential to the reuse times of the trace's last 24 hours, by hour of the day and category (type and turn), as
"KVCache cache in the wild" does offline with the log of the last day (appendix A.1). The file is for the eviction
policy workload_aware:fits=FILE, in simulate-cache and in services."""


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "fit", help="fit the reuse of its last day, for workload_aware:fits=FILE", description=_DESCRIPTION
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
    add_memory(parser)
    parser.set_defaults(run=fit)


def _seconds(text: str) -> float:
    """Returns the seconds of a time of day such as ``10:00``."""
    found = re.fullmatch(r"([01]?[0-9]|2[0-3]):([0-5][0-9])", text, re.ASCII)
    if found is None:
        raise argparse.ArgumentTypeError(f"not a time of day such as 10:00: {text!r}")
    return 3600.0 * int(found[1]) + 60.0 * int(found[2])


def fit(arguments: argparse.Namespace) -> int:
    """Reads the trace, fits and writes the file. Raises :class:`PinyonError`."""
    trace = open_trace(arguments)
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
