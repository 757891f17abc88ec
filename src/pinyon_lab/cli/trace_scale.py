"""The command ``pinyon trace scale``, which makes a smaller trace with the same course of time."""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any, get_args

from pinyon.core.errors import InvalidArgument
from pinyon_lab.cli.trace_input import add_trace, bar, open_trace, seed_of, tell_broken
from pinyon_lab.traces import TraceFile, TraceWriter
from pinyon_lab.traces.scaling import Unit, Units

_DESCRIPTION = """\
Keep whole users, or whole sessions, or requests, chosen at random, at their own times: what they reuse of their own
stays, and so do bursts and the course of the day; what they would reuse of others' falls with them. The rows are
written as they are in the file, so that format and block size stay. The same seed keeps the same rows."""

PROGRESS_EVERY = 4096


def add_command(commands: Any) -> None:
    parser = commands.add_parser("scale", help="keep a random share of its users or sessions", description=_DESCRIPTION)
    add_trace(parser)
    parser.add_argument("out", type=Path, metavar="OUT", help="a file (.gz: gzipped), or - for standard output")
    parser.add_argument("--factor", type=float, required=True, help="share of the rows to keep, above 0, up to 1")
    parser.add_argument("--seed", type=seed_of, default=0, help="a whole number from 0 (default 0)")
    parser.add_argument(
        "--by",
        choices=get_args(Unit),
        help="what is kept or left out as a whole (default: the first of these that the trace names)",
    )
    parser.set_defaults(run=scale)


def scale(arguments: argparse.Namespace) -> int:
    """Reads the trace twice and writes the smaller one. Raises :class:`PinyonError`."""
    if not 0 < arguments.factor <= 1:
        raise InvalidArgument(f"--factor must be above 0 and at most 1, got {arguments.factor:g}", field="factor")
    trace = open_trace(arguments, blocks=False)
    unit: Unit = arguments.by or _unit(trace)
    with bar("reading", trace.size_bytes) as progress:
        units = Units(trace.rows(arguments.limit, progress), unit)
    tell_broken(trace)
    chosen = units.chosen(arguments.factor, random.Random(arguments.seed))
    try:
        with bar("writing", len(chosen)) as progress, TraceWriter(arguments.out) as writer:
            for done, (line, _) in enumerate(trace.lines(arguments.limit)):
                if not done and trace.header:
                    writer.write_line(trace.header)
                if chosen[done]:
                    writer.write_line(line)
                if done % PROGRESS_EVERY == 0:
                    progress(done)
    except OSError as error:
        raise InvalidArgument(f"{arguments.out}: {error.strerror}", field="out") from None
    result = {"name": "trace-scale", "rows": len(chosen), "kept_rows": sum(chosen), "by": unit, "seed": arguments.seed}
    sys.stderr.write(json.dumps(result) + "\n")
    return 0


def _unit(trace: TraceFile) -> Unit:
    """Returns the largest unit that the first row names."""
    row = next(trace.rows(1), None)
    if row is None:
        raise InvalidArgument("the trace has no whole row", field="trace")
    return "user" if row.user else "session" if row.chat else "request"
