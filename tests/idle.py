"""The gauges that are zero on an idle suite; otherwise a slot, lease, buffer or queue entry was left.

docs/use/operations.md lists the same gauges for users."""

from __future__ import annotations

from collections.abc import Callable

IDLE = {
    "lb": (
        *("queue_requests", "in_flight_requests", "placing_requests", "worker_streams", "unfinished_tokens"),
        "counted_placements",
    ),
    "conductor": ("inflight_prefills", "inflight_placements", "shared_prefixes"),
    "kvstore": (
        *("leases", "leased_objects", "open_puts", "reserved_objects", "writer_keys", "reader_keys", "lost_bytes"),
    ),
    "worker": (
        *("owned_requests", "pending_requests", "running_requests", "waiting_for_room", "room_waiters"),
        *("queued_prefills", "running_prefills", "pending_prefill_tokens", "remote_prefills", "pushes", "leases"),
        *("used_blocks", "spared_blocks", "swapping_blocks", "store_queue_blocks", "outbox_tokens"),
    ),
    "transfer": ("grants",),
}
"""The gauges of each kind of service, and of the transfer engine in workers and store nodes: ``pinyon_KIND_NAME``."""
IDLE_GAUGES = [f"pinyon_{kind}_{name}" for kind, names in IDLE.items() for name in names]


def left_in(kind: str, gauge: Callable[[str], float]) -> dict[str, float]:
    """Returns the gauges of one kind that are not zero; ``gauge`` reads one by its name."""
    return {name: value for name in IDLE[kind] if (value := gauge(name))}
