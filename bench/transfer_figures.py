"""The measurements of all systems at all points, and what is made of them: ratios, aims, tables, pictures."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.pictures import Panel, Series, chart
from bench.report import Aim, summary
from bench.transfer_pair import Sample, System
from bench.transfer_side import READ, WRITE, Plan

KIB, MIB = 1 << 10, 1 << 20
OPCODES = (WRITE, READ)
SINGLES = (4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB, 256 * MIB)
BATCHES = ((128, 4 * KIB), (128, 64 * KIB), (256, MIB))
LARGE = [size for size in SINGLES if size >= MIB]
SMALL = [size for size in SINGLES if size < MIB]

TCP = System("pinyon_tcp", "pinyon tcp, checksum on", "bench.transfer_pinyon", "tcp,on")
SHM = System("pinyon_shm", "pinyon shm", "bench.transfer_pinyon", "shm")
AUTO = System("pinyon_auto", "pinyon auto", "bench.transfer_pinyon", "auto")
UNCHECKED = System("pinyon_tcp_checksum_off", "pinyon tcp, checksum off", "bench.transfer_pinyon", "tcp,off")
PEER = System("mooncake", "Mooncake tcp", "bench.transfer_peer", "")
NIXL_SHM = System("nixl_shm", "NIXL, shared memory", "bench.transfer_nixl", "shm")
NIXL_TCP = System("nixl_tcp", "NIXL, tcp", "bench.transfer_nixl", "tcp")
SOCKETS = [
    System(
        f"sockets_{connections}_{buffers.replace(' ', '')}",
        f"plain sockets, {connections} × {buffers}",
        "bench.transfer_raw",
        f"{connections},{kib}",
        large_only=(connections, kib) != (1, 256),
    )
    for connections in (1, 2, 4)
    for buffers, kib in (("256 KiB", 256), ("4 MiB", 4096))
]
"""Plain sockets by connections and buffers: as large as a core's cache holds, as ours without checksums, and larger."""
PROCESS_VM = System("process_vm", "process_vm_readv/writev", "bench.transfer_raw", "process_vm")
MEMCPY = System("memcpy", "memcpy", "bench.transfer_raw", "memcpy", processes=1)
SYSTEMS = [TCP, UNCHECKED, SHM, AUTO, PEER, NIXL_TCP, NIXL_SHM, *SOCKETS, PROCESS_VM, MEMCPY]
OURS = (TCP, SHM, AUTO, UNCHECKED)


@dataclass(frozen=True)
class Point:
    """Single transfers of a size, or batches of blocks of that size."""

    batch: int
    size: int

    @property
    def name(self) -> str:
        size = f"{self.size // MIB}MiB" if self.size >= MIB else f"{self.size // KIB}KiB"
        return size if self.batch == 1 else f"{self.batch}x{size}"

    @property
    def label(self) -> str:
        """The name for people."""
        return self.name.replace("x", "×").replace("KiB", " KiB").replace("MiB", " MiB")

    @property
    def nbytes(self) -> int:
        return self.batch * self.size

    def plan(self, opcode: str, seed: int, quick: bool) -> Plan:
        """Returns a plan of bytes for some tenths of a second: more of them the cheaper they are to move."""
        if self.size >= MIB:
            total = max(self.nbytes * (1 if quick else 2), (128 if quick else 256) * MIB)
        elif self.batch > 1:
            total = self.nbytes * (12 if quick else 40)
        else:
            total = self.size * (500 if quick else 2000)
        return Plan(opcode, self.size, self.batch, max(1, total // self.nbytes), seed, 0.7 if quick else 4.0)


POINTS = [*(Point(1, size) for size in SINGLES), *(Point(batch, size) for batch, size in BATCHES)]


@dataclass
class Measured:
    """All samples, and the reasons of systems that have none."""

    samples: dict[tuple[str, str, str], list[Sample]] = field(default_factory=dict)
    """One sample per repetition, by (system, direction, point)."""
    missing: dict[str, str] = field(default_factory=dict)

    def values(self, system: System, opcode: str, point: Point, figure: str) -> list[float]:
        found = self.samples.get((system.name, opcode, point.name), [])
        return [getattr(sample, figure) for sample in found]

    def ratios(self, ours: System, other: System, opcode: str, point: Point, figure: str) -> list[float]:
        """Returns ours / other within each repetition; empty when either was not measured."""
        pairs = zip(self.values(ours, opcode, point, figure), self.values(other, opcode, point, figure), strict=False)
        return [mine / theirs for mine, theirs in pairs]

    def best_sockets(self, opcode: str, point: Point) -> System:
        """Returns the connections and buffers with the best median here."""

        def median(system: System) -> float:
            return statistics.median(self.values(system, opcode, point, "throughput_gb_s") or [0.0])

        return max(SOCKETS, key=median)


def figures(measured: Measured, systems: Iterable[System]) -> dict[str, Any]:
    """Returns median, min and max by system, direction, point and figure."""
    out: dict[str, Any] = {}
    for system in systems:
        for opcode in OPCODES:
            for point in POINTS:
                if measured.values(system, opcode, point, "p50_us"):
                    out.setdefault(system.name, {}).setdefault(opcode, {})[point.name] = {
                        figure: summary(measured.values(system, opcode, point, figure), 4)
                        for figure in ("throughput_gb_s", "p50_us", "p99_us", "cpu_s_per_gb")
                    }
    return out


RATIOS: dict[str, tuple[System, System | None, str]] = {
    "tcp_to_mooncake_throughput": (TCP, PEER, "throughput_gb_s"),
    "tcp_to_mooncake_p50": (TCP, PEER, "p50_us"),
    "tcp_to_mooncake_cpu": (TCP, PEER, "cpu_s_per_gb"),
    "tcp_to_best_sockets_throughput": (TCP, None, "throughput_gb_s"),
    "tcp_to_sockets_cpu": (TCP, SOCKETS[0], "cpu_s_per_gb"),
    "shm_to_process_vm_throughput": (SHM, PROCESS_VM, "throughput_gb_s"),
    "shm_to_memcpy_throughput": (SHM, MEMCPY, "throughput_gb_s"),
    "tcp_off_to_mooncake_throughput": (UNCHECKED, PEER, "throughput_gb_s"),
    "tcp_off_to_mooncake_p50": (UNCHECKED, PEER, "p50_us"),
    "tcp_off_to_best_sockets_throughput": (UNCHECKED, None, "throughput_gb_s"),
    "tcp_to_nixl_p50": (TCP, NIXL_TCP, "p50_us"),
    "tcp_to_nixl_throughput": (TCP, NIXL_TCP, "throughput_gb_s"),
    "shm_to_nixl_p50": (SHM, NIXL_SHM, "p50_us"),
    "shm_to_nixl_throughput": (SHM, NIXL_SHM, "throughput_gb_s"),
    "auto_to_mooncake_throughput": (AUTO, PEER, "throughput_gb_s"),
    "checksum_on_to_off_throughput": (TCP, UNCHECKED, "throughput_gb_s"),
}
"""The name of each ratio, with ours, the other (None: the plain sockets that are best at the point), and the figure."""


def comparisons(measured: Measured) -> dict[str, Any]:
    """Returns median, min and max by ratio, direction and point, where both were measured."""
    out: dict[str, Any] = {}
    for name, (ours, other, figure) in RATIOS.items():
        for opcode in OPCODES:
            for point in POINTS:
                against = other or measured.best_sockets(opcode, point)
                ratios = measured.ratios(ours, against, opcode, point, figure)
                if ratios:
                    out.setdefault(name, {}).setdefault(opcode, {})[point.name] = summary(ratios, 3)
    return out


def aims(measured: Measured) -> list[Aim]:
    """Returns the aims. Over several points the worst one counts."""
    compared = comparisons(measured)
    large = [Point(1, size) for size in LARGE]
    with_batches = [point for point in POINTS if point.nbytes >= MIB]
    out: list[Aim] = []

    def aim(text: str, ratio: str, opcode: str, points: list[Point], target: float, at_most: bool = False) -> None:
        ours, other, figure = RATIOS[ratio]
        needed = [ours, *([other] if other else SOCKETS)]
        if all(measured.values(system, opcode, point, figure) for system in needed for point in points):
            found = compared[ratio][opcode]
            medians = [found[point.name]["median"] for point in points]
            out.append(Aim(text, target, (max if at_most else min)(medians), at_most))
            return
        reasons = [f"{each.name}: {measured.missing[each.name]}" for each in needed if each.name in measured.missing]
        out.append(Aim(text, target, None, at_most, "; ".join(reasons) or "not measured"))

    for opcode in OPCODES:
        aim(f"tcp {opcode} / Mooncake, 1 MiB and more, least", "tcp_to_mooncake_throughput", opcode, large, 1.3)
        for mode, ratio in (("on", "tcp"), ("off", "tcp_off")):
            name = f"tcp {opcode}, checksum {mode} / best plain sockets, 1 MiB and more, also in batches, least"
            aim(name, f"{ratio}_to_best_sockets_throughput", opcode, with_batches, 0.9)
    for batch, size in BATCHES:
        for opcode in OPCODES:
            point = Point(batch, size)
            for mode, ratio in (("on", "tcp"), ("off", "tcp_off")):
                name = f"tcp {opcode} {point.name}, checksum {mode} / Mooncake"
                aim(name, f"{ratio}_to_mooncake_throughput", opcode, [point], 2.0)
    for size in SMALL:
        for opcode in OPCODES:
            point = Point(1, size)
            for mode, ratio in (("on", "tcp"), ("off", "tcp_off")):
                name = f"tcp {opcode} {point.name} p50, checksum {mode} / Mooncake"
                aim(name, f"{ratio}_to_mooncake_p50", opcode, [point], 1.0, True)
        aim(f"shm read {Point(1, size).name} p50 / NIXL", "shm_to_nixl_p50", READ, [Point(1, size)], 3.0, True)
    for opcode in OPCODES:
        aim(f"shm {opcode} / process_vm, 1 MiB and more, least", "shm_to_process_vm_throughput", opcode, large, 0.85)
    for opcode in OPCODES:
        aim(f"tcp {opcode} CPU per GB / Mooncake, all points, most", "tcp_to_mooncake_cpu", opcode, POINTS, 1.0, True)
    return out


def show(measured: Measured) -> None:
    """Prints tables for people on stderr."""
    console = Console(stderr=True, width=120)
    for title, figure, points, digits in (
        ("Throughput, GB/s", "throughput_gb_s", POINTS, 2),
        ("p50, µs", "p50_us", POINTS[:3], 1),
        ("p99, µs", "p99_us", POINTS[:3], 1),
        ("CPU seconds per GB, both processes", "cpu_s_per_gb", POINTS, 2),
    ):
        for opcode in OPCODES:
            table = Table(title=f"{title}: {opcode}", title_justify="left", padding=(0, 0))
            table.add_column("", no_wrap=True)
            for point in points:
                table.add_column(point.label, justify="right")
            for system in SYSTEMS:
                cells = [measured.values(system, opcode, point, figure) for point in points]
                if any(cells):
                    table.add_row(
                        system.label, *(f"{statistics.median(cell):.{digits}f}" if cell else "" for cell in cells)
                    )
            console.print(table)


def draw(measured: Measured, folder: Path) -> None:
    """Writes the four pictures into ``folder``."""
    one_each = [TCP, SHM, AUTO, PEER, SOCKETS[0], PROCESS_VM, MEMCPY, NIXL_TCP, NIXL_SHM]

    def panel(title: str, opcode: str, points: list[Point], systems: Iterable[System], figure: str) -> Panel:
        rows = []
        for system in systems:
            cells = [measured.values(system, opcode, point, figure) for point in points]
            if any(cells):
                rows.append(Series(system.label, one_each.index(system), [_spread(cell) for cell in cells]))
        return Panel(title, [point.label for point in points], rows)

    singles = [Point(1, size) for size in SINGLES]
    small = [Point(1, size) for size in SMALL]
    batches = [Point(batch, size) for batch, size in BATCHES]
    few = [TCP, SHM, PEER, SOCKETS[0], PROCESS_VM, NIXL_TCP, NIXL_SHM]
    folder.mkdir(parents=True, exist_ok=True)
    for name, title, unit, panels, joined in (
        ("throughput", "Single transfers", "GB/s (median, least, most)",
         [panel(opcode, opcode, singles, one_each, "throughput_gb_s") for opcode in OPCODES], True),
        ("latency", "Small transfers", "µs (median, least, most of the repetitions)",
         [panel(f"{opcode}, {figure[:3]}", opcode, small, few, figure)
          for opcode in OPCODES for figure in ("p50_us", "p99_us")], False),
        ("batches", "Batches", "GB/s (median, least, most)",
         [panel(opcode, opcode, batches, one_each, "throughput_gb_s") for opcode in OPCODES], False),
        ("cpu", "CPU of both processes", "seconds per GB (median, least, most)",
         [panel(opcode, opcode, POINTS, few, "cpu_s_per_gb")
          for opcode in OPCODES], False),
    ):  # fmt: skip
        if any(each.series for each in panels):
            (folder / f"transfer-{name}.svg").write_text(chart(title, unit, panels, joined=joined))


def _spread(values: list[float]) -> tuple[float, float, float] | None:
    return (min(values), statistics.median(values), max(values)) if values else None
