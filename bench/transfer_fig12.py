"""Fig. 12 of the Mooncake paper: the time to move a cache to another node, in pieces of 128 KB, 64 at a time, beside
torch.distributed's Gloo and plain TCP. Here both ends are on one host: the kernel's copies are the limit and not a NIC.

A cache larger than the memory is moved through it again and again, whole: a system that takes longer than
``LIMIT_S_PER_GB`` allows has no figures. Systems take turns, in an order that rotates, and ratios are formed within a
repetition. Plain TCP is the best of 1, 2 and 4 connections with small and with large buffers. A size is moved once by
each system at least, and again while that is likely to end within the size's share of the budget."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.report import Aim, Report, progress, summary
from bench.transfer_figures import OPCODES, PEER, SHM, SOCKETS, TCP, UNCHECKED
from bench.transfer_pair import Pair, Sample, System, SystemFailed
from bench.transfer_side import Plan

PIECE_BYTES, CONCURRENCY = 128 << 10, 64
MEMORY_BYTES = 256 << 20
SIZES_GB, QUICK_SIZES_GB = (1.0, 4.0, 10.0), (1.0,)
LEAST_GB, MOST_GB = 0.1, 100.0
TORCH = "torch==2.13.0"
GLOO = System("gloo", "torch.distributed, Gloo", "bench.transfer_gloo", "")
SYSTEMS = [TCP, UNCHECKED, SHM, PEER, GLOO, *SOCKETS]
OURS = (TCP, UNCHECKED, SHM)
REPETITIONS = 3
"""The largest number of repetitions."""
BUDGET_S, QUICK_BUDGET_S = 540.0, 24.0
"""The time for all samples together. Beyond it each system still moves each size once."""
LIMIT_S_PER_GB = 10.0
"""The hard limit of a sample: a system slower than 0.1 GB/s has failed."""

Start = Callable[[Sequence[System], int, Path, dict[System, Pair], dict[str, str]], None]
"""A call with ``(systems, bytes of memory, folder of logs, pairs to be filled, reasons of missing systems)``."""


@dataclass
class Measured:
    """All samples, and the reasons of systems that have none."""

    sizes: Sequence[float]
    """The sizes in gigabytes."""
    samples: dict[tuple[System, str, float], list[Sample]] = field(default_factory=dict)
    """One sample per repetition, by (system, direction, gigabytes)."""
    missing: dict[str, str] = field(default_factory=dict)

    def rates(self, system: System, opcode: str, size: float) -> list[float]:
        """Returns GB/s, one value per repetition."""
        return [sample.throughput_gb_s for sample in self.samples.get((system, opcode, size), [])]

    def best_sockets(self, opcode: str, size: float) -> System:
        """Returns the connections and buffers with the best median here."""
        return max(SOCKETS, key=lambda system: statistics.median(self.rates(system, opcode, size) or [0.0]))

    def ratio(self, ours: System, other: System, opcode: str, size: float) -> float:
        """Returns the median of ours / other within the repetitions; both must have been measured."""
        pairs = zip(self.rates(ours, opcode, size), self.rates(other, opcode, size), strict=False)
        return statistics.median(mine / theirs for mine, theirs in pairs)


def gigabytes(text: str) -> float:
    """Parses an option's size in GB."""
    try:
        size = float(text)
    except ValueError:
        size = math.nan
    if not LEAST_GB <= size <= MOST_GB:
        raise argparse.ArgumentTypeError(f"not a number of GB from {LEAST_GB:g} to {MOST_GB:g}: {text!r}")
    return size


def measure(
    arguments: argparse.Namespace, kind: str, start: Start, close: Callable[[dict[System, Pair]], None]
) -> None:
    """Moves each size by each system; prints tables and report. A system that fails has no figures from there on."""
    sizes = sorted(set(arguments.gigabytes or (QUICK_SIZES_GB if arguments.quick else SIZES_GB)))
    wanted = [system for system in SYSTEMS if not arguments.only or system.name in arguments.only]
    measured = Measured(sizes)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as logs, contextlib.ExitStack() as stack:
        pairs: dict[System, Pair] = {}
        stack.callback(close, pairs)
        start(wanted, MEMORY_BYTES, Path(logs), pairs, measured.missing)
        budget_s = QUICK_BUDGET_S if arguments.quick else BUDGET_S
        cells = [(opcode, size) for opcode in OPCODES for size in sizes]
        # By the root: in shares by size the smallest would not be repeated. Time that a cell leaves goes to the next
        # ones.
        shares = list(itertools.accumulate(math.sqrt(size) for _, size in cells))
        begun = time.monotonic()
        for (opcode, size), share in zip(cells, shares, strict=True):
            _measure(pairs, measured, opcode, size, begun + budget_s * share / shares[-1], arguments.seed)
    _show(wanted, measured)
    report = Report(
        "transfer",
        {
            "figure": "Mooncake, Fig. 12",
            "piece_bytes": PIECE_BYTES,
            "concurrency": CONCURRENCY,
            "memory_bytes": MEMORY_BYTES,
            "repetitions": REPETITIONS,
            "pinyon": kind,
            "missing": measured.missing,
            "duration_s": round(time.monotonic() - started, 1),
        },
    )
    rows = {system: _rows(measured, system) for system in wanted}
    report.results = {system.name: row for system, row in rows.items() if system in OURS}
    report.baseline = {system.name: row for system, row in rows.items() if system not in OURS}
    report.aims = [_aim(measured, other, opcode) for other in (GLOO, None) for opcode in OPCODES]
    report.emit()


def _measure(
    pairs: dict[System, Pair],
    measured: Measured,
    opcode: str,
    size: float,
    until: float,
    seed: int,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Measures one cell by all systems in turn; not again if that would end after ``until`` (of ``clock``)."""
    count = math.ceil(size * 1e9 / (PIECE_BYTES * CONCURRENCY))
    plan = Plan(opcode, PIECE_BYTES, CONCURRENCY, count, seed, size * LIMIT_S_PER_GB)
    last_s = 0.0
    done = 0
    while pairs and done < REPETITIONS and (done == 0 or clock() + last_s <= until):
        started = clock()
        systems = list(pairs)
        turn = done * len(systems) // REPETITIONS
        for system in systems[turn:] + systems[:turn]:
            try:
                sample = pairs[system].measure(plan, seed + done, verify=done == 0)
                if sample.gigabytes < plan.nbytes / 1e9:
                    raise SystemFailed(f"moved {sample.gigabytes:.1f} GB in {plan.limit_s:g} s")
            except SystemFailed as error:
                measured.missing[system.name] = f"{opcode} {size:g} GB: {error}"
                pairs.pop(system).close()
                continue
            measured.samples.setdefault((system, opcode, size), []).append(sample)
        last_s = clock() - started
        done += 1
    progress(f"{opcode} {size:g} GB: {done} repetitions of {len(pairs)} systems")


def _rows(measured: Measured, system: System) -> dict[str, dict[str, dict[str, object]]]:
    """Returns the measurements by direction, then size."""
    out: dict[str, dict[str, dict[str, object]]] = {}
    for opcode in OPCODES:
        for size in measured.sizes:
            samples = measured.samples.get((system, opcode, size))
            if samples:
                rates = measured.rates(system, opcode, size)
                out.setdefault(opcode, {})[f"{size:g}GB"] = {
                    "seconds": round(size / statistics.median(rates), 3),
                    "throughput_gb_s": summary(rates, 3),
                    "cpu_s_per_gb": summary([sample.cpu_s_per_gb for sample in samples], 3),
                    "repetitions": len(samples),
                }
    return out


def _aim(measured: Measured, other: System | None, opcode: str) -> Aim:
    """Returns the aim for throughput beside the other's (None: plain TCP with the best connections and buffers), at the
    worst of the sizes. It is not measured if a size or one of the others is missing: the best is unknown then."""
    name = f"Fig. 12, {opcode}: {TCP.label} / {other.label if other else 'best plain TCP'}"
    needed = [TCP, *([other] if other else SOCKETS)]
    if not all(measured.rates(system, opcode, size) for system in needed for size in measured.sizes):
        reasons = [f"{each.name}: {measured.missing[each.name]}" for each in needed if each.name in measured.missing]
        return Aim(name, 1.0, None, False, reason="; ".join(reasons) or "not measured")
    ratios = [
        measured.ratio(TCP, other or measured.best_sockets(opcode, size), opcode, size) for size in measured.sizes
    ]
    return Aim(name, 1.0, round(min(ratios), 3), False)


def _show(wanted: list[System], measured: Measured) -> None:
    console = Console(stderr=True, width=120)
    for opcode in OPCODES:
        table = Table(
            title=f"Seconds, and GB/s (medians): {opcode}, pieces of 128 KiB, 64 at a time", title_justify="left"
        )
        table.add_column("", no_wrap=True)
        for size in measured.sizes:
            table.add_column(f"{size:g} GB", justify="right")
        for system in wanted:
            cells = [(size, measured.rates(system, opcode, size)) for size in measured.sizes]
            if any(rates for _, rates in cells):
                row = [
                    f"{size / statistics.median(rates):.2f} ({statistics.median(rates):.2f})" if rates else ""
                    for size, rates in cells
                ]
                table.add_row(system.label, *row)
        console.print(table)
