"""Options that are numbers, with their help texts and bounds."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from pinyon.core.errors import InvalidArgument
from pinyon_lab.simulator.regions.day import ON_DEMAND, RESERVED

REFERENCE = "prefill-reference"
INSTANCES_MAX = 1 << 16
WARM_UP = 500
"""The default number of first requests that do not count, as caches are empty at the start."""
_TOGETHER = "these two go together (default: none)"


class NumberOption(NamedTuple):
    """An option with its bounds and help text; if its bounds are whole numbers, so are its values."""

    metavar: str | None
    text: str
    least: float
    most: float
    default: float | None = None


NUMBERS: Mapping[str, NumberOption] = {
    "--instances": NumberOption("N", "how many, each for prompts and decoding", 1, INSTANCES_MAX),
    "--prefill-instances": NumberOption("P", f"how many for prompts alone; {_TOGETHER}", 0, INSTANCES_MAX, 0),
    "--decode-instances": NumberOption("D", f"how many for decoding alone; {_TOGETHER}", 0, INSTANCES_MAX, 0),
    "--tokens-max": NumberOption("N", "cut prompts to so many tokens (default 20480)", 1, 1 << 31, 20_480),
    "--shrink": NumberOption("F", "divide all lengths by this, after --tokens-max (default 1)", 1, 1 << 20, 1),
    "--warm-up": NumberOption(
        "N", f"first requests, which do not count (default {WARM_UP}, but a tenth of the trace at most)", 0, 1 << 31
    ),
    "--cache-tokens": NumberOption(
        "C",
        "tokens of KV, in whole blocks, that an instance holds, or a node of its pipeline (default: the machine's "
        f"HBM; needed for {REFERENCE}, which has none)",
        *(1, 1 << 50),
    ),
    "--dram-tokens": NumberOption("N", "tokens of KV in the tier below HBM (default: the machine's DRAM)", 0, 1 << 50),
    "--pool-tokens": NumberOption(
        "N",
        f"tokens of KV in a host's part of the pool (default: its DRAM; with {REFERENCE} and --pool ssd, three "
        "times --cache-tokens)",
        *(1, 1 << 50),
    ),
    "--clients": NumberOption(
        "N",
        "number of clients; each sends when it has its answer (default: requests come at their times)",
        *(0, 1 << 20, 0),
    ),
    "--timeout": NumberOption("S", "a request fails after this (default 600)", 1e-3, 1e6, 600.0),
    "--in-flight-max": NumberOption(
        "N", "most requests at a time; further ones wait in this program (default 4096)", 1, 1 << 20, 4096
    ),
    "--pipeline": NumberOption(
        "X", "nodes of each prefill instance, each with the machine's memory, pool and NICs (default 1)", 1, 1024, 1
    ),
    "--max-batch": NumberOption("N", "requests decoded at once (default 256)", 1, 1 << 16, 256),
    "--step-tokens": NumberOption("N", "most tokens of a mixed step (default 2048)", 1, 1 << 24, 2048),
    "--chunk-tokens": NumberOption("N", "most tokens of one prompt in a step (default: --step-tokens)", 1, 1 << 24),
    "--step-tbt": NumberOption(
        "S",
        "most seconds that a mixed step should take: chunks are cut to fit (default 0: no limit)",
        *(0.0, 60.0, 0.0),
    ),
    "--whole-tokens": NumberOption(
        "N",
        "most tokens of whole prompts in one step; a longer prompt has a step alone (default 32768)",
        *(1, 1 << 24, 32_768),
    ),
    "--active-prefills": NumberOption(
        "N", "prompts that an instance works on at a time; the others wait in its queue (default 8)", 1, 1 << 16, 8
    ),
    "--utilisation": NumberOption(
        "U", "share of its stated speed at which the engine computes prompts (default 1)", 1e-3, 1.0, 1.0
    ),
    "--slo": NumberOption("S", "a TTFT up to this is in time (default 5)", 1e-6, 1e6, 5.0),
    "--tbt-slo": NumberOption("S", "a time between tokens up to this is in time (default 0.1)", 1e-6, 1e6, 0.1),
    "--shed": NumberOption("S", "refuse requests whose predicted TTFT is longer (default: none)", 1e-6, 1e6),
    "--shed-tbt": NumberOption(
        "S", "refuse requests whose predicted time between tokens is longer (default: none)", 1e-6, 1e6
    ),
    "--path-ms": NumberOption(
        "MS",
        "that a request takes through the services, and its first token back, where nobody waits (default 0)",
        *(0.0, 1e6, 0.0),
    ),
    "--rate": NumberOption("R", "requests per second in the mean (default: the trace's)", 1e-9, 1e9),
    "--goodput": NumberOption("SHARE", "find the highest rate at which that share is in time", 1e-6, 1.0),
    "--p99": NumberOption(
        "S",
        "with --goodput: the P99 of the TTFT must be within this, too (default: no bound)",
        *(1e-6, math.inf, math.inf),
    ),
    "--drift": NumberOption(
        "SHARE",
        "with --goodput: how far the last quarter's share in time may be below that of all (default 1: any)",
        *(0.0, 1.0, 1.0),
    ),
    "--share": NumberOption(None, "share of the requests that must be in time (default 0.9)", 0.0, 1.0, 0.9),
    "--instances-max": NumberOption("N", "the most instances that are tried (default 1024)", 1, INSTANCES_MAX, 1024),
    "--day": NumberOption("S", "seconds of virtual time that a day lasts (default 1200)", 60.0, 1e6, 1200.0),
    "--reserved": NumberOption("$", f"price of a reserved instance per hour (default {RESERVED})", 1e-6, 1e9, RESERVED),
    "--on-demand": NumberOption(
        "$", f"price of an instance on demand per hour (default {ON_DEMAND})", 1e-6, 1e9, ON_DEMAND
    ),
    "--window-s": NumberOption("S", "the step of figures over time (default 600)", 1e-3, 1e9, 600.0),
    "--memory-gib": NumberOption("GIB", "memory that it may take (default 12)", 1e-6, 1 << 20, 12.0),
}


def add_numbers(parser: Any, *options: str) -> None:
    for option in options:
        number = NUMBERS[option]
        parser.add_argument(
            option, type=type(number.least), default=number.default, metavar=number.metavar, help=number.text
        )


def check_numbers(arguments: argparse.Namespace) -> None:
    """Checks the number options that the command has. Raises :class:`InvalidArgument`."""
    for option, number in NUMBERS.items():
        name = dest(option)
        value = getattr(arguments, name, None)
        if value is not None and not number.least <= value <= number.most:
            least, most = _shown(number.least), _shown(number.most)
            raise InvalidArgument(f"{option} must be from {least} to {most}, got {value}", field=name)


def refuse_given(arguments: argparse.Namespace, names: Iterable[str], why: str) -> None:
    """Raises :class:`InvalidArgument` if any of these options, which have no effect here, differs from its default."""
    for name in names:
        if getattr(arguments, name) != arguments.parser.get_default(name):
            raise InvalidArgument(f"--{name.replace('_', '-')} {why}", field=name)


def dest(option: str) -> str:
    """Returns the name under which a parser stores the option."""
    return option.removeprefix("--").replace("-", "_")


def _shown(bound: float) -> str:
    return f"{bound:,}" if isinstance(bound, int) else f"{bound:g}"
