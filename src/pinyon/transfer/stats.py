"""Counters of one engine. Pure: the recorder's owner serialises the calls, services turn a snapshot into metrics."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from pinyon.transfer.request import Opcode, Reason, TransferStatus

__all__ = ["LATENCY_BUCKETS_S", "StatsRecorder", "TransferStats"]

LATENCY_BUCKETS_S = (
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
)
"""Upper bounds in seconds; one more bucket takes the rest."""


@dataclass(frozen=True, slots=True)
class TransferStats:
    """A snapshot. Everything counts from the engine's start except the four ``*_now`` gauges."""

    read_bytes: int = 0
    """Completed, as initiator."""
    written_bytes: int = 0
    served_read_bytes: int = 0
    """Sent to peers that READ from us."""
    served_written_bytes: int = 0
    """Received from peers that WRITE to us."""
    requests: dict[str, int] = field(default_factory=dict)
    """By final status, as initiator."""
    failures: dict[str, int] = field(default_factory=dict)
    """By reason, as initiator: every request that did not complete."""
    served_refusals: int = 0
    """Ranges refused to peers."""
    protocol_errors: int = 0
    """Inbound connections closed because of what they sent."""
    auth_failures: int = 0
    retries: int = 0
    """Chains sent again over a new connection."""
    latency_sum_s: float = 0.0
    """Submission to final status, summed over requests."""
    latency_buckets: tuple[int, ...] = (0,) * (len(LATENCY_BUCKETS_S) + 1)
    """Requests per bucket of ``LATENCY_BUCKETS_S``, not cumulative."""
    batches_now: int = 0
    requests_now: int = 0
    outbound_connections_now: int = 0
    inbound_connections_now: int = 0


class StatsRecorder:
    """Mutable side of :class:`TransferStats`."""

    def __init__(self) -> None:
        self._requests = dict.fromkeys((status.value for status in TransferStatus if status.is_final), 0)
        self._failures: dict[str, int] = {}
        self._moved = {Opcode.READ: 0, Opcode.WRITE: 0}
        self._served = {Opcode.READ: 0, Opcode.WRITE: 0}
        self._latency_sum_s = 0.0
        self._buckets = [0] * (len(LATENCY_BUCKETS_S) + 1)
        self.served_refusals = 0
        self.protocol_errors = 0
        self.auth_failures = 0
        self.retries = 0

    def moved(self, opcode: Opcode, nbytes: int) -> None:
        self._moved[opcode] += nbytes

    def served(self, opcode: int, nbytes: int, refused: int) -> None:
        self._served[Opcode(opcode)] += nbytes
        self.served_refusals += refused

    def finished(self, status: TransferStatus, reason: Reason, count: int, latency_s: float) -> None:
        """``count`` requests reached this final status, each ``latency_s`` after its submission."""
        self._requests[status.value] += count
        if status is not TransferStatus.COMPLETED:
            name = reason.name.lower()
            self._failures[name] = self._failures.get(name, 0) + count
        self._latency_sum_s += latency_s * count
        self._buckets[bisect_left(LATENCY_BUCKETS_S, latency_s)] += count

    def snapshot(self, *, batches: int, requests: int, outbound: int, inbound: int) -> TransferStats:
        return TransferStats(
            read_bytes=self._moved[Opcode.READ],
            written_bytes=self._moved[Opcode.WRITE],
            served_read_bytes=self._served[Opcode.READ],
            served_written_bytes=self._served[Opcode.WRITE],
            requests=dict(self._requests),
            failures=dict(self._failures),
            served_refusals=self.served_refusals,
            protocol_errors=self.protocol_errors,
            auth_failures=self.auth_failures,
            retries=self.retries,
            latency_sum_s=self._latency_sum_s,
            latency_buckets=tuple(self._buckets),
            batches_now=batches,
            requests_now=requests,
            outbound_connections_now=outbound,
            inbound_connections_now=inbound,
        )
