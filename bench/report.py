"""The output of a benchmark: one JSON object on its last line of stdout, and aims that are met or not."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ARGUMENTS_ONLY = "PINYON_BENCH_ARGUMENTS_ONLY"
"""The environment variable by which a benchmark ends as soon as its arguments are found to be good."""


@dataclass(frozen=True)
class Aim:
    """One aim. ``measured`` and ``target`` are in the unit the name ends in; ``at_most`` says which side is good.

    ``measured`` is None, and the aim not met, when it could not be measured; ``reason`` then says why. Otherwise it
    says what a reader should know beside the number."""

    name: str
    target: float
    measured: float | None
    at_most: bool = True
    reason: str = ""

    @property
    def met(self) -> bool:
        if self.measured is None:
            return False
        return self.measured <= self.target if self.at_most else self.measured >= self.target


@dataclass
class Report:
    """The figures of one benchmark. Keys of results end in their unit."""

    name: str
    config: dict[str, Any]
    results: dict[str, Any] = field(default_factory=dict)
    baseline: dict[str, Any] = field(default_factory=dict)
    aims: list[Aim] = field(default_factory=list)

    def emit(self) -> None:
        """Prints the object as the last line of stdout."""
        from pinyon.core.compiled import compiled  # not above: peer processes need nothing of ours

        machine = {
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "machine": platform.machine(),
            "compiled": {"pinyon": compiled(), "services": _services_compiled()},
        }
        aims = []
        for aim in self.aims:
            said = {**asdict(aim), "met": aim.met}
            del said["at_most"]
            if not aim.reason:
                del said["reason"]
            aims.append(said)
        line = {
            "name": self.name,
            "config": {**self.config, **machine},
            "results": self.results,
            "baseline": self.baseline,
            "aims": aims,
        }
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


def _services_compiled() -> bool:
    found = importlib.util.find_spec("pinyon.http.connection")
    return found is not None and not str(found.origin).endswith(".py")


def percentile(values: Sequence[float], percent: float) -> float:
    """Returns the nearest-rank percentile."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, round(percent / 100 * len(ordered) + 0.5) - 1))]


def summary(values: Sequence[float], digits: int = 1) -> dict[str, float]:
    """Returns the median over repetitions, with min and max beside it."""
    return {
        "median": round(statistics.median(values), digits),
        "min": round(min(values), digits),
        "max": round(max(values), digits),
    }


class _Parser(argparse.ArgumentParser):
    def parse_args(self, *arguments: Any, **named: Any) -> Any:
        parsed = super().parse_args(*arguments, **named)
        if os.environ.get(ARGUMENTS_ONLY):
            sys.exit(0)
        return parsed


def parser(description: str | None) -> argparse.ArgumentParser:
    """Returns a parser with the options that every benchmark has."""
    options = _Parser(prog=f"./dev bench {Path(sys.argv[0]).stem}", description=description)
    options.add_argument("--quick", action="store_true", help="a rough answer within 50 s")
    options.add_argument("--seed", type=int, default=1, help="random seed (default 1)")
    return options


def number(low: int, high: int) -> Callable[[str], int]:
    """Returns a parser of an option's number from ``low`` to ``high``."""

    def read(text: str) -> int:
        if not text.isdecimal() or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"not a number from {low} to {high}: {text!r}")
        return int(text)

    return read


def progress(text: str) -> None:
    """Writes a line for people to stderr: stdout is the JSON's."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
