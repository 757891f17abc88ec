"""Requests, their statuses and their results. Pure values.

A request is a one-sided READ or WRITE between a range of a registered local region and one of a peer's
(Mooncake §3.2.2)."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, IntEnum
from typing import NamedTuple

from pinyon.transfer.types.errors import (
    TransferCancelled,
    TransferError,
    TransferFailed,
    TransferRefused,
    TransferTimeout,
)
from pinyon.transfer.types.segment import SegmentDescriptor


class Opcode(IntEnum):
    """The direction, seen from the caller. The numbers are on the wire."""

    READ = 1
    """A copy from the remote range to the local range."""
    WRITE = 2
    """A copy from the local range to the remote range."""


class TransferStatus(Enum):
    """A request goes from PENDING to exactly one final status, and never changes after that."""

    PENDING = "pending"
    """Submitted: queued or on the wire."""
    COMPLETED = "completed"
    """All bytes are in place; for a WRITE the peer said so."""
    REFUSED = "refused"
    """The peer refused and touched nothing; of a request cut into frames, nothing of the refused parts."""
    FAILED = "failed"
    """The peer is gone or the connection broke. The destination range holds any mix of old and new bytes."""
    TIMEOUT = "timeout"
    """The transfer stalled or passed its total deadline. The destination is as for FAILED."""
    CANCELLED = "cancelled"
    """The caller, ``unregister`` or ``close`` stopped the request. The destination is as for FAILED."""

    @property
    def is_final(self) -> bool:
        return self is not TransferStatus.PENDING


class Reason(IntEnum):
    """The reason why a request did not complete; 1 to 15 are on the wire as a peer's answer to one request."""

    NONE = 0
    UNKNOWN_REGION = 1
    """The key opens nothing: it never did, was revoked, its time is up, or its region was unregistered."""
    OUT_OF_RANGE = 2
    """Offset and length reach outside what the key opens."""
    ACCESS_DENIED = 3
    """The key does not open anything for this opcode."""
    OTHER_TRANSPORT = 4
    """The transport does not reach the region's memory, a device's; the engine goes on with another transport."""

    STALE_SEGMENT = 16
    """The process behind the address has another boot id than the descriptor."""
    UNAUTHENTICATED = 17
    """The cluster secrets differ, or only one side has one."""
    BUSY = 18
    """The peer has no room for another connection."""
    CONNECT_FAILED = 19
    """Connection refused, no route, name not found."""
    CONNECTION_LOST = 20
    """The connection broke in mid-transfer, and the one allowed reconnect did not help."""
    PROTOCOL = 21
    """The peer's bytes do not parse, or it speaks another version."""
    STALLED = 22
    """The transfer moved no byte for the stall limit (frozen peer, dead link)."""
    DEADLINE = 23
    """The total deadline passed."""
    CANCELLED = 24
    SHUTDOWN = 25
    """The local engine closed, or the local region was unregistered."""
    INTERNAL = 26
    """A defect of this engine, or no more threads; logged where it happened."""
    CHECKSUM = 27
    """The bytes that arrived are not those that were sent."""
    NO_PATH = 28
    """The allowed transports do not reach the peer."""

    @property
    def is_stale(self) -> bool:
        """True if the key is gone because its owner took it back or was restarted; the caller may ask for a new one."""
        return self is Reason.UNKNOWN_REGION or self is Reason.STALE_SEGMENT

    @property
    def is_path_failure(self) -> bool:
        """True if the path to the peer failed, not the request: another path may work."""
        return self in _PATH_FAILURES


_PATH_FAILURES = frozenset(
    {Reason.BUSY, Reason.CONNECT_FAILED, Reason.CONNECTION_LOST, Reason.PROTOCOL, Reason.STALLED, Reason.CHECKSUM}
)


class TransferRequest(NamedTuple):
    """An order to move ``length`` bytes between a local and a remote range, checked when submitted, not when made.

    A named tuple and not a dataclass because thousands are made per batch and this is the cheapest immutable value."""

    opcode: Opcode
    local: bytes
    """Key of a region registered with this engine (``region.key``)."""
    local_offset: int
    """Bytes from the start of the local region."""
    remote: SegmentDescriptor
    """The process whose memory it is; its ``regions`` may be left empty."""
    remote_region: bytes
    """Key of the remote region, 16 bytes."""
    remote_offset: int
    """Bytes from the start of the remote region."""
    length: int
    """Bytes, at least 1."""


class TransferResult(NamedTuple):
    """The state of one request at one moment; final when ``status.is_final``."""

    status: TransferStatus
    transferred_bytes: int
    """Bytes known to be in place; equal to the request's length exactly when COMPLETED."""
    reason: Reason = Reason.NONE

    @property
    def ok(self) -> bool:
        return self.status is TransferStatus.COMPLETED


_ERRORS: dict[TransferStatus, type[TransferError]] = {
    TransferStatus.REFUSED: TransferRefused,
    TransferStatus.FAILED: TransferFailed,
    TransferStatus.TIMEOUT: TransferTimeout,
    TransferStatus.CANCELLED: TransferCancelled,
}


def raise_for_failure(results: Iterable[TransferResult]) -> None:
    """Raises the error of the first request that did not complete.

    Its final status decides: TransferRefused, TransferFailed, TransferTimeout or TransferCancelled. A request that
    is not final yet raises TransferError."""
    for index, result in enumerate(results):
        if result.status is not TransferStatus.COMPLETED:
            kind = _ERRORS.get(result.status, TransferError)
            raise kind(f"transfer request {index} {result.status.value}: {result.reason.name.lower()}")
