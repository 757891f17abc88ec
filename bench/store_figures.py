"""The figures of the store benchmark: its rows and sides, ratios within a round, aims, and the tables for people."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.report import Aim, percentile, summary
from bench.transfer_pair import System

KIB, MIB = 1 << 10, 1 << 20
SIZES = (4 * KIB, 64 * KIB, MIB, 4 * MIB, 16 * MIB)
PUT, GET, EXISTS = "put", "get", "exists"
EXISTS_KEYS = (1, 4096)

OURS = System("pinyon-tcp", "pinyon tcp", "bench.store_pinyon", "tcp")
SHM = System("pinyon-shm", "pinyon shm", "bench.store_pinyon", "shm")
PEER = System("mooncake", "Mooncake", "bench.store_mooncake", "tcp")
REDIS = System("redis", "Redis", "bench.store_redis", "")
SIDES = (OURS, SHM, PEER, REDIS)
CROWD_SIDES = (OURS, PEER, REDIS)
"""The sides of the row with many connections: those whose bytes go over a socket."""


@dataclass(frozen=True)
class Row:
    """One row: calls of ``batch`` objects (of ``exists``: keys) each."""

    op: str
    size: int
    batch: int

    @property
    def name(self) -> str:
        unit = f"{self.batch} × " if self.batch > 1 else ""
        what = "1 key" if self.batch == 1 else f"{self.batch:,} keys"
        return f"{self.op} {what}" if self.op == EXISTS else f"{self.op} {unit}{size_label(self.size)}"

    @property
    def aim(self) -> float:
        """The least ratio of our operations per second to Mooncake's."""
        if self.op == EXISTS:
            return 0.5
        return 1.0 if self.batch == 1 and self.size < 64 * KIB else 1.5


def size_label(size: int) -> str:
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"


def batch_of(size: int) -> int:
    """Returns the number of objects in a batched call."""
    return 64 if size <= MIB else 8


def groups(sizes: Iterable[int]) -> list[list[Row]]:
    """Returns the rows, those together that are about the same objects: they are put, then read, then removed."""
    pairs = [(size, batch) for size in sizes for batch in (1, batch_of(size))]
    return [
        *([Row(PUT, size, batch), Row(GET, size, batch)] for size, batch in pairs),
        *([Row(EXISTS, 4 * KIB, keys)] for keys in EXISTS_KEYS),
    ]


@dataclass(frozen=True)
class Sample:
    """One round of one side at one row."""

    spent_us: Sequence[float]
    seconds: float
    client_cpu_s: float
    server_cpu_s: float
    batch: int

    @property
    def operations(self) -> int:
        """The number of objects or keys."""
        return len(self.spent_us) * self.batch

    @property
    def ops_s(self) -> float:
        return self.operations / self.seconds


@dataclass
class Measured:
    samples: dict[tuple[str, Row], list[Sample]] = field(default_factory=dict)
    """The samples by the side's name and the row, one per round."""
    missing: dict[str, str] = field(default_factory=dict)
    """The reasons why sides have no figures, or none from some row on."""
    crowds: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The answers about many connections, by the side's name."""

    def ratio(self, row: Row, ours: System = OURS, other: System = PEER) -> float | None:
        """Returns the median over rounds of our operations per second to the other's; None where one has none."""
        pairs = zip(self.samples.get((ours.name, row), []), self.samples.get((other.name, row), []), strict=False)
        ratios = [mine.ops_s / its.ops_s for mine, its in pairs]
        return statistics.median(ratios) if ratios else None


def figures(row: Row, samples: Sequence[Sample]) -> dict[str, Any]:
    """Returns the figures of one side at one row; latencies are those of whole calls, of all rounds together."""
    spent = [each for sample in samples for each in sample.spent_us]
    count = sum(sample.operations for sample in samples)
    found: dict[str, Any] = {
        "ops_s": summary([sample.ops_s for sample in samples], 0),
        "p50_us": round(percentile(spent, 50), 1),
        "p99_us": round(percentile(spent, 99), 1),
        "client_cpu_us": round(sum(sample.client_cpu_s for sample in samples) / count * 1e6, 2),
        "server_cpu_us": round(sum(sample.server_cpu_s for sample in samples) / count * 1e6, 2),
        "calls": len(spent),
    }
    if row.op != EXISTS:
        found["gb_s"] = summary([sample.ops_s * row.size / 1e9 for sample in samples], 3)
    return found


def results(measured: Measured, sides: Iterable[System]) -> dict[str, Any]:
    """Returns the figures of these sides, by side and row."""
    found: dict[str, Any] = {}
    for side in sides:
        rows = {
            row.name: figures(row, samples) for (name, row), samples in measured.samples.items() if name == side.name
        }
        if rows:
            found[side.name] = rows
        if side.name in measured.crowds:
            found.setdefault(side.name, {})["connections"] = crowd_figures(measured.crowds[side.name])
    return found


def crowd_figures(crowd: dict[str, Any]) -> dict[str, Any]:
    found = {key: value for key, value in crowd.items() if key not in (PUT, GET)}
    for op in (PUT, GET):
        if op in crowd:
            phase, spent = crowd[op], crowd[op]["spent_us"]
            count = max(1, len(spent))
            found[op] = {
                "ops_s": round(len(spent) / phase["seconds"]),
                "p50_us": round(percentile(spent, 50)) if spent else None,
                "p99_us": round(percentile(spent, 99)) if spent else None,
                "client_cpu_us": round(phase["client_cpu_s"] / count * 1e6, 1),
                "server_cpu_us": round(phase["server_cpu_s"] / count * 1e6, 1),
                "failed": phase["failed"],
                "failure": phase["failure"],
            }
    return found


def aims(measured: Measured, rows: Iterable[Row]) -> list[Aim]:
    """Returns one aim per row: our operations per second to Mooncake's, both over TCP."""
    reason = measured.missing.get(PEER.name) or measured.missing.get(OURS.name) or "not measured"
    found = []
    for row in rows:
        ratio = measured.ratio(row)
        value = None if ratio is None else round(ratio, 3)
        found.append(Aim(f"{row.name}, ratio to Mooncake", row.aim, value, False, reason if value is None else ""))
    return found
