"""The commands ``pinyon trace generate`` and ``scale``, which write a workload from a seed and a share of a trace."""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import re
import sys
from pathlib import Path
from typing import Any, get_args

from rich.console import Console
from rich.table import Column, Table

from pinyon.cli.called import called_as
from pinyon.core.errors import InvalidArgument
from pinyon_lab.cli.trace_input import add_trace, bar, open_trace, positive, reading, seed_of
from pinyon_lab.traces import TraceFile, TraceWriter
from pinyon_lab.traces.generate import DAY_S, PROFILES, generate, profile
from pinyon_lab.traces.scaling import Unit, chosen

_DESCRIPTION = """\
Write a trace with the published statistics of a workload whose own traces are not public, or not long enough. The same
profile, parameters and seed make the same file everywhere. What nobody published is a parameter with a range
(--profiles lists them, --vary sets them). A day begins at midnight; anything shorter begins at 10:00."""

_SCALE = """\
Keep whole users, or whole sessions, or requests, chosen at random, at their own times: what they reuse of their own
stays, and so do bursts and the course of the day; what they would reuse of others' falls with them. The rows are
written as they are in the file, so that format and block size stay. The same seed keeps the same rows."""

DURATION_MAX_S = 31 * DAY_S
PER_S_MAX = 1_000.0
ROWS_EVERY = 256
LINES_EVERY = 4096
_SPANS = ((3600.0, "h"), (60.0, "min"))
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": DAY_S}


def add_command(commands: Any) -> None:
    parser = commands.add_parser("generate", help="make a trace from a profile and a seed", description=_DESCRIPTION)
    add = parser.add_argument
    add("profile", nargs="?", choices=tuple(PROFILES), metavar="PROFILE", help=f"one of {', '.join(PROFILES)}")
    add("out", nargs="?", type=Path, metavar="OUT", help="the file (.gz: gzipped; -: standard output)")
    add("--seed", type=seed_of, default=1, help="a whole number from 0 (default 1)")
    add("--duration", type=_seconds, metavar="TIME", help="such as 2m, 2h or 5d (default: the profile's)")
    rate = positive(f"a rate above 0 and up to {PER_S_MAX:,.0f} per second", PER_S_MAX)
    add("--per-s", type=rate, metavar="RATE", help="requests per second at the day's busiest time")
    add("--vary", action="append", default=[], metavar="NAME=VALUE", help="set a parameter of the profile; repeatable")
    add("--profiles", action="store_true", help="list the profiles with their free parameters")
    parser.set_defaults(run=trace_generate)


def _seconds(text: str) -> float:
    """Returns the seconds of an option such as ``90m``."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if found is None or not 0 < float(found[1]) * _UNITS[found[2]] <= DURATION_MAX_S:
        raise argparse.ArgumentTypeError(f"not a time up to 31d, such as 90m, 2h or 5d: {text!r}")
    return float(found[1]) * _UNITS[found[2]]


def trace_generate(arguments: argparse.Namespace) -> int:
    """Writes the trace. Raises :class:`PinyonError`."""
    if arguments.profiles:
        _list()
        return 0
    if arguments.profile is None or arguments.out is None:
        raise InvalidArgument(
            f"a profile and a file are needed: {called_as()} trace generate PROFILE OUT", field="profile"
        )
    made = profile(arguments.profile, **dict(map(_varied, arguments.vary)))
    if arguments.per_s is not None:
        made = dataclasses.replace(made, per_s=arguments.per_s)
    if arguments.duration is not None:
        start_s = 0.0 if arguments.duration >= DAY_S else made.start_s
        made = dataclasses.replace(made, duration_s=arguments.duration, start_s=start_s)
    tokens = blocks = 0
    with bar("generating", int(made.duration_s)) as progress, TraceWriter(arguments.out, made.format) as writer:
        for row in generate(made, arguments.seed):
            writer.write(row)
            tokens += row.input_tokens
            blocks += len(row.blocks)
            if writer.rows % ROWS_EVERY == 0:
                progress(int(row.time_s))
    unit_s, unit = next((each for each in _SPANS if made.duration_s >= each[0]), (1.0, "s"))
    sys.stderr.write(
        f"{writer.rows:,} requests, {blocks:,} blocks, {tokens:,} input tokens in {made.duration_s / unit_s:g} {unit}: "
        f"profile {made.name}, seed {arguments.seed}, format {made.format}\n"
    )
    return 0


def _varied(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        return name, float(value)
    except ValueError:
        raise InvalidArgument(f"--vary takes NAME=VALUE with a number, got {text!r}", field="vary") from None


def _list() -> None:
    for name, spec in PROFILES.items():
        numbers = (Column(each, justify="right") for each in ("usual", "from", "to"))
        title = f"{name}: {spec.text}"
        table = Table(
            "parameter", *numbers, "", title=title, title_justify="left", title_style="bold", box=None, pad_edge=False
        )
        for key, free in spec.free.items():
            table.add_row(key, f"{free.usual:g}", f"{free.low:g}", f"{free.high:g}", free.text)
        Console().print(table)


def add_scale(commands: Any) -> None:
    parser = commands.add_parser("scale", help="keep a random share of its users or sessions", description=_SCALE)
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
    trace = open_trace(arguments.trace, arguments.format, blocks=False)
    unit: Unit = arguments.by or _unit(trace)
    with reading(trace) as progress:
        kept = chosen(trace.rows(arguments.limit, progress), unit, arguments.factor, random.Random(arguments.seed))
    try:
        with bar("writing", len(kept)) as progress, TraceWriter(arguments.out) as writer:
            for done, (line, _) in enumerate(trace.lines(arguments.limit)):
                if not done and trace.header:
                    writer.write_line(trace.header)
                if kept[done]:
                    writer.write_line(line)
                if done % LINES_EVERY == 0:
                    progress(done)
    except OSError as error:
        raise InvalidArgument(f"{arguments.out}: {error.strerror}", field="out") from None
    result = {"name": "trace-scale", "rows": len(kept), "kept_rows": sum(kept), "by": unit, "seed": arguments.seed}
    sys.stderr.write(json.dumps(result) + "\n")
    return 0


def _unit(trace: TraceFile) -> Unit:
    """Returns the largest unit that the first row names."""
    row = next(trace.rows(1), None)
    if row is None:
        raise InvalidArgument("the trace has no whole row", field="trace")
    return "user" if row.user else "session" if row.chat else "request"
