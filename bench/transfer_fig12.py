"""Fig. 12 of the Mooncake paper: how long a cache takes to another node, in pieces of 128 KB, 64 at a time, beside
torch.distributed's Gloo and plain TCP. Here both ends are on one host: the kernel's copies are the limit and not a NIC.

A cache larger than the memory is moved through it again and again. Systems take turns, in an order that rotates, and
ratios are formed within a repetition; plain TCP is the best of 1, 2 and 4 connections. Each sample has its share of the
time: a system that is too slow for a size moves as much of it as it can (``moved_gb``), and its seconds are what all of
it would take at that rate.
"""

from __future__ import annotations

import argparse
import contextlib
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

__all__ = ["GLOO", "TORCH", "Measured", "measure"]

PIECE_BYTES, CONCURRENCY = 128 << 10, 64
MEMORY_BYTES = 256 << 20
SIZES_GB = (1.0, 4.0, 10.0, 20.0, 40.0)
TORCH = "torch==2.13.0"
GLOO = System("gloo", "torch.distributed, Gloo", "bench.transfer_gloo", "")
SYSTEMS = [TCP, UNCHECKED, SHM, PEER, GLOO, *SOCKETS]
OURS = (TCP, UNCHECKED, SHM)
REPETITIONS = 3
BUDGET_S, QUICK_BUDGET_S = 540.0, 24.0
"""For all samples together."""

Start = Callable[[Sequence[System], int, Path, dict[System, Pair], dict[str, str]], None]
"""``(systems, bytes of memory, folder of logs, pairs to be filled, reasons of those that are missing)``"""


@dataclass
class Measured:
    """All samples, and why there are none of a system."""

    sizes: Sequence[float]
    """Gigabytes."""
    samples: dict[tuple[System, str, float], list[Sample]] = field(default_factory=dict)
    """(system, direction, gigabytes) → one sample per repetition."""
    missing: dict[str, str] = field(default_factory=dict)

    def rates(self, system: System, opcode: str, size: float) -> list[float]:
        """GB/s, one per repetition."""
        return [sample.throughput_gb_s for sample in self.samples.get((system, opcode, size), [])]

    def best_sockets(self, opcode: str, size: float) -> System:
        """The number of connections with the best median here."""
        return max(SOCKETS, key=lambda system: statistics.median(self.rates(system, opcode, size) or [0.0]))

    def ratio(self, ours: System, other: System, opcode: str, size: float) -> float | None:
        """Median of ours / other within the repetitions; None: either was not measured."""
        pairs = zip(self.rates(ours, opcode, size), self.rates(other, opcode, size), strict=False)
        ratios = [mine / theirs for mine, theirs in pairs]
        return statistics.median(ratios) if ratios else None


def measure(
    arguments: argparse.Namespace, kind: str, start: Start, close: Callable[[dict[System, Pair]], None]
) -> None:
    """Move each size by each system, print the tables and the report. A system that fails has no figures from there."""
    sizes = [size for size in SIZES_GB if size <= (1.0 if arguments.quick else arguments.gigabytes)]
    wanted = [system for system in SYSTEMS if not arguments.only or system.name in arguments.only]
    measured = Measured(sizes)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as logs, contextlib.ExitStack() as stack:
        pairs: dict[System, Pair] = {}
        stack.callback(close, pairs)
        start(wanted, MEMORY_BYTES, Path(logs), pairs, measured.missing)
        budget_s = QUICK_BUDGET_S if arguments.quick else BUDGET_S
        for opcode in OPCODES:
            for size in sizes:
                # By the root: in shares by size the smallest had a tenth of a second.
                share_s = budget_s * math.sqrt(size) / (sum(map(math.sqrt, sizes)) * len(OPCODES))
                _measure(pairs, measured, opcode, size, share_s, arguments.seed)
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
    pairs: dict[System, Pair], measured: Measured, opcode: str, size: float, share_s: float, seed: int
) -> None:
    """One cell of the figure, by all systems in turn."""
    count = max(1, round(size * 1e9 / (PIECE_BYTES * CONCURRENCY)))
    limit_s = share_s / (REPETITIONS * max(1, len(pairs)))
    plan = Plan(opcode, PIECE_BYTES, CONCURRENCY, count, seed, limit_s)
    for repetition in range(REPETITIONS):
        systems = list(pairs)
        turn = repetition * len(systems) // REPETITIONS
        for system in systems[turn:] + systems[:turn]:
            try:
                sample = pairs[system].measure(plan, seed + repetition, verify=repetition == 0)
            except SystemFailed as error:
                measured.missing[system.name] = f"{opcode} {size:g} GB: {error}"
                pairs.pop(system).close()
                continue
            measured.samples.setdefault((system, opcode, size), []).append(sample)
    progress(f"{opcode} {size:g} GB: {REPETITIONS} repetitions of {len(pairs)} systems")


def _rows(measured: Measured, system: System) -> dict[str, dict[str, dict[str, object]]]:
    """Direction → size → what was measured."""
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
                    "moved_gb": round(min(sample.gigabytes for sample in samples), 2),
                }
    return out


def _aim(measured: Measured, other: System | None, opcode: str) -> Aim:
    """Throughput beside the other's (None: plain TCP with as many connections as are best), at the worst of the
    sizes."""
    name = f"Fig. 12, {opcode}: {TCP.label} / {other.label if other else 'plain TCP, best of 1, 2, 4 connections'}"
    ratios = [
        measured.ratio(TCP, other or measured.best_sockets(opcode, size), opcode, size) for size in measured.sizes
    ]
    known = [ratio for ratio in ratios if ratio is not None]
    if len(known) < len(ratios) or not known:
        reason = measured.missing.get(other.name if other else SOCKETS[0].name) or measured.missing.get(TCP.name)
        return Aim(name, 1.0, None, False, reason=reason or "not measured")
    return Aim(name, 1.0, round(min(known), 3), False)


def _show(wanted: list[System], measured: Measured) -> None:
    console = Console(stderr=True, width=120)
    for opcode in OPCODES:
        table = Table(
            title=f"Seconds, and GB/s (median of {REPETITIONS}): {opcode}, pieces of 128 KiB, 64 at a time",
            title_justify="left",
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
