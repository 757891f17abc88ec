"""Counters of one engine. Pure: who holds the lock calls, services turn a snapshot into metrics."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from pinyon.transfer.types.path import Path
from pinyon.transfer.types.request import Opcode, Reason, TransferStatus

LATENCY_BUCKETS_S: Final = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
"""Upper bounds in seconds; one more bucket takes the rest."""


MAX_PATHS = 1024
"""Paths that are counted apart; beyond that they share one entry without NIC names."""


@dataclass(frozen=True, slots=True)
class PathStats:
    """What went over one path as initiator, summed over peers. The local NIC alone: sum over ``path.local_nic``."""

    path: Path
    nbytes: int
    """Completed."""
    chains: int
    failures: dict[str, int]
    """Attempts that failed because of the path, by reason."""
    retries: int
    """Of these, how many went on over another path."""
    latency_sum_s: float
    latency_buckets: tuple[int, ...]
    """Completed chains per bucket of ``LATENCY_BUCKETS_S``, not cumulative."""
    short: int = 0
    """Of the chains, how many were one small request that its caller's thread moved the short way (``small.py``)."""


class _PathRecorder:
    __slots__ = ("buckets", "chains", "failures", "latency_sum_s", "nbytes", "retries", "short")

    def __init__(self) -> None:
        self.nbytes = self.chains = self.retries = self.short = 0
        self.failures: dict[str, int] = {}
        self.latency_sum_s = 0.0
        self.buckets = [0] * (len(LATENCY_BUCKETS_S) + 1)


@dataclass(frozen=True, slots=True)
class TransferStats:
    """A snapshot. Everything counts from the engine's start except the ``*_now`` gauges."""

    read_bytes: int = 0
    """Completed, as initiator."""
    written_bytes: int = 0
    served_read_bytes: int = 0
    """Sent to peers that READ from us: by tcp. By shm and RDMA they read without us."""
    served_written_bytes: int = 0
    """Taken from peers that WRITE to us, by tcp and shm. By RDMA they write without us."""
    requests: dict[str, int] = field(default_factory=dict)
    """By final status, as initiator."""
    failures: dict[str, int] = field(default_factory=dict)
    """By reason, as initiator: every request that did not complete."""
    served_refusals: dict[str, int] = field(default_factory=dict)
    """Ranges and keys refused to peers, by reason."""
    protocol_errors: int = 0
    """Inbound connections closed because of what they sent."""
    auth_failures: int = 0
    retries: int = 0
    """Chains sent again, over another path or a new connection."""
    latency_sum_s: float = 0.0
    """Submission to final status, summed over requests."""
    latency_buckets: tuple[int, ...] = (0,) * (len(LATENCY_BUCKETS_S) + 1)
    """Requests per bucket of ``LATENCY_BUCKETS_S``, not cumulative."""
    paths: tuple[PathStats, ...] = ()
    batches_now: int = 0
    requests_now: int = 0
    outbound_connections_now: int = 0
    inbound_connections_now: int = 0
    grants_now: int = 0
    """Open to peers: given, neither revoked nor expired."""


class Meter:
    """The engine's counters, of which :class:`TransferStats` is a snapshot, with the lock that guards them."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._requests = dict.fromkeys((status.value for status in TransferStatus if status.is_final), 0)
        self._failures: dict[str, int] = {}
        self._moved = {Opcode.READ: 0, Opcode.WRITE: 0}
        self._served: dict[int, int] = {Opcode.READ: 0, Opcode.WRITE: 0}
        self._latency_sum_s = 0.0
        self._buckets = [0] * (len(LATENCY_BUCKETS_S) + 1)
        self._paths: dict[Path, _PathRecorder] = {}
        self._refusals: dict[str, int] = {}
        self.protocol_errors = 0
        self.auth_failures = 0
        self.retries = 0

    def _path(self, path: Path) -> _PathRecorder:
        recorder = self._paths.get(path)
        if recorder is None:
            if len(self._paths) >= MAX_PATHS:
                path = Path(path.transport, "", "")
            recorder = self._paths.setdefault(path, _PathRecorder())
        return recorder

    def path_completed(self, path: Path, nbytes: int, elapsed_s: float) -> None:
        recorder = self._path(path)
        recorder.nbytes += nbytes
        recorder.chains += 1
        recorder.latency_sum_s += elapsed_s
        recorder.buckets[bisect_left(LATENCY_BUCKETS_S, elapsed_s)] += 1

    def went_short(self, path: Path, opcode: Opcode, nbytes: int, elapsed_s: float) -> None:
        """One request that was one chain, completed. What ``path_completed``, ``moved`` and ``finished`` count, at
        once."""
        recorder = self._paths.get(path) or self._path(path)
        bucket = bisect_left(LATENCY_BUCKETS_S, elapsed_s)
        recorder.nbytes += nbytes
        recorder.chains += 1
        recorder.short += 1
        recorder.latency_sum_s += elapsed_s
        recorder.buckets[bucket] += 1
        self._moved[opcode] += nbytes
        self._requests["completed"] += 1
        self._latency_sum_s += elapsed_s
        self._buckets[bucket] += 1

    def path_failed(self, path: Path, reason: Reason, retried: bool) -> None:
        recorder = self._path(path)
        name = reason.name.lower()
        recorder.failures[name] = recorder.failures.get(name, 0) + 1
        recorder.retries += retried
        self.retries += retried

    def moved(self, opcode: Opcode, nbytes: int) -> None:
        self._moved[opcode] += nbytes

    def served(self, opcode: int, nbytes: int, refusals: bytes | None = None) -> None:
        """``refusals``: a ``Reason`` number per range, 0 = served; None when all were."""
        self._served[opcode] += nbytes  # an Opcode hashes as its number
        if refusals is not None:
            self.refused(refusals)

    def refused(self, codes: Iterable[int]) -> None:
        """``Reason`` numbers of what a peer asked for; 0 = granted."""
        for code in codes:
            if code:
                name = Reason(code).name.lower()
                self._refusals[name] = self._refusals.get(name, 0) + 1

    def finished(self, status: TransferStatus, reason: Reason, count: int, latency_s: float) -> None:
        """``count`` requests reached this final status, each ``latency_s`` after its submission."""
        self._requests[status.value] += count
        if status is not TransferStatus.COMPLETED:
            name = reason.name.lower()
            self._failures[name] = self._failures.get(name, 0) + count
        self._latency_sum_s += latency_s * count
        self._buckets[bisect_left(LATENCY_BUCKETS_S, latency_s)] += count

    def snapshot(self, *, batches: int, requests: int, outbound: int, inbound: int, grants: int) -> TransferStats:
        return TransferStats(
            read_bytes=self._moved[Opcode.READ],
            written_bytes=self._moved[Opcode.WRITE],
            served_read_bytes=self._served[Opcode.READ],
            served_written_bytes=self._served[Opcode.WRITE],
            requests=dict(self._requests),
            failures=dict(self._failures),
            served_refusals=dict(self._refusals),
            protocol_errors=self.protocol_errors,
            auth_failures=self.auth_failures,
            retries=self.retries,
            latency_sum_s=self._latency_sum_s,
            latency_buckets=tuple(self._buckets),
            paths=tuple(
                PathStats(
                    path,
                    one.nbytes,
                    one.chains,
                    dict(one.failures),
                    one.retries,
                    one.latency_sum_s,
                    tuple(one.buckets),
                    one.short,
                )
                for path, one in self._paths.items()
            ),
            batches_now=batches,
            requests_now=requests,
            outbound_connections_now=outbound,
            inbound_connections_now=inbound,
            grants_now=grants,
        )
