"""The command ``pinyon trace generate``, which makes a workload from a seed, with the statistics that papers print."""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from pinyon.cli.called import called_as
from pinyon.core.errors import InvalidArgument
from pinyon_lab.cli.trace_input import bar, positive, seed_of
from pinyon_lab.traces import TraceWriter
from pinyon_lab.traces.generate import DAY_S, PROFILES, generate, profile

_DESCRIPTION = """\
Write a trace with the published statistics of a workload whose own traces are not public, or not long enough. The same
profile, parameters and seed make the same file everywhere. What nobody published is a parameter with a range
(--profiles lists them, --vary sets them). A day begins at midnight; anything shorter begins at 10:00."""

DURATION_MAX_S = 31 * DAY_S
PER_S_MAX = 1_000.0
ROWS_EVERY = 256
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
    sys.stderr.write(
        f"{writer.rows:,} requests, {blocks:,} blocks, {tokens:,} input tokens in {_span(made.duration_s)}: "
        f"profile {made.name}, seed {arguments.seed}, format {made.format}\n"
    )
    return 0


def _span(seconds: float) -> str:
    """Returns the duration in the largest unit of which it is at least one."""
    unit, name = next(((size, name) for size, name in _SPANS if seconds >= size), (1.0, "s"))
    return f"{seconds / unit:g} {name}"


def _varied(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        return name, float(value)
    except ValueError:
        raise InvalidArgument(f"--vary takes NAME=VALUE with a number, got {text!r}", field="vary") from None


def _list() -> None:
    for name, spec in PROFILES.items():
        title = f"{name}: {spec.text}"
        table = Table("parameter", title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
        for column in ("usual", "from", "to"):
            table.add_column(column, justify="right")
        table.add_column()
        for key, free in spec.free.items():
            table.add_row(key, f"{free.usual:g}", f"{free.low:g}", f"{free.high:g}", free.text)
        Console().print(table)
