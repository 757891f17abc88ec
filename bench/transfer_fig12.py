"""Fig. 12 of the Mooncake paper: how long a cache takes to another node, in pieces of 128 KB, 64 at a time, beside
torch.distributed's Gloo and plain TCP. Here both ends are on one host: the kernel's copies are the limit and not a NIC.

A cache larger than the memory is moved through it again and again.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.peers import PeerUnavailable, peer_python
from bench.report import Aim, Report, progress
from bench.transfer_figures import OPCODES, PEER, SHM, SOCKETS, TCP, UNCHECKED
from bench.transfer_pair import Pair, Sample, System, SystemFailed
from bench.transfer_side import Plan

__all__ = ["measure"]

PIECE_BYTES, CONCURRENCY = 128 << 10, 64
MEMORY_BYTES = 1 << 30
SIZES_GB = (1.0, 4.0, 10.0, 20.0, 40.0)
TORCH = "torch==2.13.0"
GLOO = System("gloo", "torch.distributed, Gloo", "bench.transfer_gloo", "")
SYSTEMS = [TCP, UNCHECKED, SHM, PEER, GLOO, SOCKETS[0]]

Cell = tuple[str, str, float]
"""System, direction, gigabytes."""


def measure(arguments: argparse.Namespace, src: Path, kind: str, python_of: Callable[[System], Path]) -> None:
    """Move each size by each system, print the tables and the report. A system that fails has no figures from there."""
    sizes = [size for size in SIZES_GB if size <= (1.0 if arguments.quick else arguments.gigabytes)]
    wanted = [system for system in SYSTEMS if not arguments.only or system.name in arguments.only]
    samples: dict[Cell, Sample] = {}
    missing: dict[str, str] = {}
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as logs, contextlib.ExitStack() as stack:
        for system in wanted:  # one at a time: each pair has 2 GiB of memory
            try:
                python = peer_python(TORCH, "torch.distributed", also=("numpy>=2",)) if system == GLOO else None
                pair = Pair(system, python or python_of(system), MEMORY_BYTES, Path(logs), src)
                stack.callback(pair.close)
                pair.ready()
            except (PeerUnavailable, SystemFailed) as error:
                missing[system.name] = str(error)
                progress(f"without {system.label}: {error}")
                continue
            _measure(system, pair, sizes, arguments.seed, samples, missing)
            pair.close()
    _show(wanted, sizes, samples)
    report = Report(
        "transfer",
        {
            "figure": "Mooncake, Fig. 12",
            "piece_bytes": PIECE_BYTES,
            "concurrency": CONCURRENCY,
            "memory_bytes": MEMORY_BYTES,
            "pinyon": kind,
            "missing": missing,
            "duration_s": round(time.monotonic() - started, 1),
        },
    )
    rows = {
        system.name: {
            opcode: {f"{size:g}GB": _row(samples[system.name, opcode, size], size) for size in sizes}
            for opcode in OPCODES
            if all((system.name, opcode, size) in samples for size in sizes)
        }
        for system in wanted
    }
    ours = {system.name for system in (TCP, UNCHECKED, SHM)}
    report.results = {name: row for name, row in rows.items() if name in ours}
    report.baseline = {name: row for name, row in rows.items() if name not in ours}
    report.aims = [
        _aim(TCP, other, opcode, sizes, samples, missing) for other in (GLOO, SOCKETS[0]) for opcode in OPCODES
    ]
    report.emit()


def _measure(
    system: System, pair: Pair, sizes: list[float], seed: int, samples: dict[Cell, Sample], missing: dict[str, str]
) -> None:
    for opcode in OPCODES:
        for number, size in enumerate(sizes):
            count = max(1, round(size * 1e9 / (PIECE_BYTES * CONCURRENCY)))
            plan = Plan(opcode, PIECE_BYTES, CONCURRENCY, count, seed)
            try:
                sample = pair.measure(plan, seed + number, verify=number == 0)
            except SystemFailed as error:
                missing[system.name] = f"{opcode} {size:g} GB: {error}"
                return
            samples[system.name, opcode, size] = sample
            progress(f"{system.label}, {opcode} {size:g} GB: {sample.throughput_gb_s:.2f} GB/s")


def _row(sample: Sample, size: float) -> dict[str, float]:
    return {
        "seconds": round(size / sample.throughput_gb_s, 3),
        "throughput_gb_s": round(sample.throughput_gb_s, 3),
        "cpu_s_per_gb": round(sample.cpu_s_per_gb, 3),
    }


def _aim(
    ours: System, other: System, opcode: str, sizes: list[float], samples: dict[Cell, Sample], missing: dict[str, str]
) -> Aim:
    """Throughput beside the other's, the median over the sizes."""
    name = f"Fig. 12, {opcode}: {ours.label} / {other.label}"
    cells = [(samples.get((ours.name, opcode, size)), samples.get((other.name, opcode, size))) for size in sizes]
    ratios = [mine.throughput_gb_s / theirs.throughput_gb_s for mine, theirs in cells if mine and theirs]
    if not ratios:
        return Aim(name, 1.0, None, False, reason=missing.get(other.name) or missing.get(ours.name) or "not measured")
    return Aim(name, 1.0, round(statistics.median(ratios), 3), False)


def _show(wanted: list[System], sizes: list[float], samples: dict[Cell, Sample]) -> None:
    console = Console(stderr=True, width=120)
    for opcode in OPCODES:
        table = Table(title=f"Seconds, and GB/s: {opcode}, pieces of 128 KiB, 64 at a time", title_justify="left")
        table.add_column("", no_wrap=True)
        for size in sizes:
            table.add_column(f"{size:g} GB", justify="right")
        for system in wanted:
            cells = [samples.get((system.name, opcode, size)) for size in sizes]
            if any(cells):
                row = [
                    f"{size / cell.throughput_gb_s:.2f} ({cell.throughput_gb_s:.2f})" if cell else ""
                    for size, cell in zip(sizes, cells, strict=True)
                ]
                table.add_row(system.label, *row)
        console.print(table)
