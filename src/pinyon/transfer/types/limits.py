"""The bounds of the engine, all in one frozen value. Pure."""

from __future__ import annotations

from dataclasses import dataclass, fields

from pinyon.transfer.types.errors import InvalidTransfer

_MIB = 1 << 20
MAX_FRAME_BYTES = 64 * _MIB
MAX_FRAME_REQUESTS = 1024
"""Bound of the protocols between peers on the requests in one frame; ``MAX_FRAME_BYTES`` is that on its payload."""
MAX_SUBMISSIONS = 4096
"""Submissions in flight at a time, whatever their size: each has a handle and chains of its own."""
MAX_BATCH_REQUESTS = 65536
MAX_REQUEST_BYTES = 1 << 36


@dataclass(frozen=True, slots=True)
class TransferLimits:
    """The bounds of an engine: seconds end in ``_s``, sizes in ``_bytes``, the rest are counts. All are positive."""

    stall_s: float = 2.0
    """Time without a byte after which a peer counts as frozen (Mooncake's engine waits 30 s here)."""
    connect_s: float = 2.0
    """Time for TCP connect and handshake together."""
    base_deadline_s: float = 5.0
    min_rate_bytes_s: int = 32 * _MIB
    """A request's total deadline is ``base_deadline_s`` + (its batch's bytes + the bytes queued before) / this rate."""

    max_inflight_requests: int = 1 << 20
    """Requests in flight over all batches: bounds the memory that queued work takes."""
    max_regions: int = 4096
    max_grants: int = 1 << 17
    """Grants open at a time: each lease of a reader, each put and each prefill has one."""
    max_grant_ranges: int = 1 << 20
    """Ranges of all open grants together."""

    max_frame_bytes: int = 8 * _MIB
    """The largest payload of one frame; a larger request is sliced."""
    max_frame_requests: int = MAX_FRAME_REQUESTS
    stripe_min_bytes: int = 4 * _MIB
    """The smallest piece when a batch to one peer is spread over several connections."""
    connections_per_peer: int = 4
    """Connections that one path may use at a time when it is the only path to the peer."""
    max_endpoints: int = 1024
    """Open connections and queue pairs towards peers, per transport; chains wait for more."""
    max_inbound: int = 1024
    """Links accepted from peers, one thread each; above it the link that has rested longest is closed."""
    max_peers: int = 4096
    """Peers whose paths are remembered."""
    max_attempts: int = 8
    """Attempts at one chain, each over a path; the chain's deadline usually ends it earlier."""
    queue_pairs_per_path: int = 2
    idle_s: float = 60.0
    """Idle time after which a connection and its thread end, on both sides."""
    socket_buffer_bytes: int = 4 * _MIB
    spin_s: float = 100e-6
    """Time that a thread polls a link for the next bytes before it sleeps; it may be 0, which never polls.

    A thread does not poll if the link is idle or cores are short."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0 and (field.name != "spin_s" or value != 0):
                raise InvalidTransfer(f"TransferLimits.{field.name} must be positive", field=field.name)
        for name, most in (("max_frame_bytes", MAX_FRAME_BYTES), ("max_frame_requests", MAX_FRAME_REQUESTS)):
            if getattr(self, name) > most:
                raise InvalidTransfer(f"the protocol allows a {name} of {most}", field=name)

    def budget_s(self, nbytes: int) -> float:
        """Returns the seconds that moving ``nbytes`` may take in total."""
        return self.base_deadline_s + nbytes / self.min_rate_bytes_s
