"""Counters of one engine. Pure: the caller holds the lock, and services turn a snapshot into metrics."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final

from pinyon.transfer.types.nic import Path
from pinyon.transfer.types.request import Opcode, Reason, TransferStatus

LATENCY_BUCKETS_S: Final = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
"""Upper bounds of the latency buckets in seconds; one more bucket takes the rest."""


MAX_PATHS = 1024
"""Paths that are counted apart; further paths of a transport share one entry without NIC names."""


def _buckets() -> list[int]:
    return [0] * (len(LATENCY_BUCKETS_S) + 1)


@dataclass(slots=True)
class PathStats:
    """Counters of one path as initiator, summed over peers. For a local NIC alone, sum over ``path.local_nic``."""

    path: Path
    nbytes: int = 0
    """Bytes completed."""
    chains: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    """Attempts that failed because of the path, by reason."""
    retries: int = 0
    """Failed attempts whose chain went on over another path."""
    latency_sum_s: float = 0.0
    latency_buckets: list[int] = field(default_factory=_buckets)
    """Completed chains per bucket of ``LATENCY_BUCKETS_S``, not cumulative."""
    short: int = 0
    """Chains that were one small request, moved by its caller the short way (``small.py``)."""


@dataclass(slots=True)
class TransferStats:
    """A snapshot of an engine's counters. All count from the engine's start except the ``*_now`` gauges."""

    read_bytes: int = 0
    """Bytes completed as initiator."""
    written_bytes: int = 0
    served_read_bytes: int = 0
    """Bytes sent to peers that READ from this process by tcp. By shm and RDMA they read without its help."""
    served_written_bytes: int = 0
    """Bytes taken from peers that WRITE to this process by tcp and shm. By RDMA they write without its help."""
    requests: dict[str, int] = field(default_factory=dict)
    """Requests as initiator, by final status."""
    failures: dict[str, int] = field(default_factory=dict)
    """Requests as initiator that did not complete, by reason."""
    served_refusals: dict[str, int] = field(default_factory=dict)
    """Ranges and keys refused to peers, by reason."""
    protocol_errors: int = 0
    """Inbound connections closed because of what they sent."""
    auth_failures: int = 0
    retries: int = 0
    """Chains sent again, over another path or a new connection."""
    latency_sum_s: float = 0.0
    """Time from submission to final status, summed over requests."""
    latency_buckets: list[int] = field(default_factory=_buckets)
    """Requests per bucket of ``LATENCY_BUCKETS_S``, not cumulative."""
    paths: tuple[PathStats, ...] = ()
    requests_now: int = 0
    outbound_connections_now: int = 0
    inbound_connections_now: int = 0
    grants_now: int = 0
    """Grants open to peers: given, neither revoked nor expired."""


class Meter:
    """The counters of a running engine; callers hold ``lock``."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.stats = TransferStats(
            requests=dict.fromkeys((status.value for status in TransferStatus if status.is_final), 0)
        )
        """Counters without those per path and without the gauges."""
        self._paths: dict[Path, PathStats] = {}

    def _path(self, path: Path) -> PathStats:
        found = self._paths.get(path)
        if found is None:
            if len(self._paths) >= MAX_PATHS:
                path = Path(path.transport, "", "")
            found = self._paths.setdefault(path, PathStats(path))
        return found

    def path_completed(self, path: Path, nbytes: int, elapsed_s: float) -> None:
        one = self._path(path)
        one.nbytes += nbytes
        one.chains += 1
        one.latency_sum_s += elapsed_s
        one.latency_buckets[bisect_left(LATENCY_BUCKETS_S, elapsed_s)] += 1

    def went_short(self, path: Path, opcode: Opcode, nbytes: int, elapsed_s: float) -> None:
        """Counts a request completed by one chain, like ``path_completed``, ``moved`` and ``finished`` together."""
        one, stats = self._paths.get(path) or self._path(path), self.stats
        bucket = bisect_left(LATENCY_BUCKETS_S, elapsed_s)
        one.nbytes += nbytes
        one.chains += 1
        one.short += 1
        one.latency_sum_s += elapsed_s
        one.latency_buckets[bucket] += 1
        if opcode is Opcode.READ:
            stats.read_bytes += nbytes
        else:
            stats.written_bytes += nbytes
        stats.requests["completed"] += 1
        stats.latency_sum_s += elapsed_s
        stats.latency_buckets[bucket] += 1

    def path_failed(self, path: Path, reason: Reason, retried: bool) -> None:
        one = self._path(path)
        _count(one.failures, reason)
        one.retries += retried
        self.stats.retries += retried

    def moved(self, opcode: Opcode, nbytes: int) -> None:
        if opcode is Opcode.READ:
            self.stats.read_bytes += nbytes
        else:
            self.stats.written_bytes += nbytes

    def served(self, opcode: int, nbytes: int, refusals: bytes | None = None) -> None:
        """Counts bytes served to a peer. ``refusals``: a ``Reason`` number per range, 0 if served; None if all were."""
        if opcode == 1:  # Opcode.READ as a number: an enum's value is slow to read
            self.stats.served_read_bytes += nbytes
        else:
            self.stats.served_written_bytes += nbytes
        if refusals is not None:
            self.refused(refusals)

    def refused(self, codes: Iterable[int]) -> None:
        """Counts refusals of what a peer asked for, by their ``Reason`` numbers; 0 means granted."""
        for code in codes:
            if code:
                _count(self.stats.served_refusals, Reason(code))

    def finished(self, status: TransferStatus, reason: Reason, count: int, latency_s: float) -> None:
        """Counts ``count`` requests that reached this final status, each ``latency_s`` after its submission."""
        stats = self.stats
        stats.requests[status.value] += count
        if status is not TransferStatus.COMPLETED:
            _count(stats.failures, reason, count)
        stats.latency_sum_s += latency_s * count
        stats.latency_buckets[bisect_left(LATENCY_BUCKETS_S, latency_s)] += count

    def snapshot(self, *, requests: int = 0, outbound: int = 0, inbound: int = 0, grants: int = 0) -> TransferStats:
        """Returns a copy of the counters with these gauges."""
        stats = self.stats
        return replace(
            stats,
            requests=dict(stats.requests),
            failures=dict(stats.failures),
            served_refusals=dict(stats.served_refusals),
            latency_buckets=list(stats.latency_buckets),
            paths=tuple(
                replace(one, failures=dict(one.failures), latency_buckets=list(one.latency_buckets))
                for one in self._paths.values()
            ),
            requests_now=requests,
            outbound_connections_now=outbound,
            inbound_connections_now=inbound,
            grants_now=grants,
        )


def _count(counts: dict[str, int], reason: Reason, more: int = 1) -> None:
    name = reason.name.lower()
    counts[name] = counts.get(name, 0) + more
