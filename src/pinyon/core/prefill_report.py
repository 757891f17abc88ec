"""What it took to compute a prompt, and what of it was reused."""

from __future__ import annotations

from typing import NamedTuple


class PrefillReport(NamedTuple):
    """Told by the instance that computed it, in milliseconds and tokens. Fetching may go on beside computing."""

    prefill_instance_id: str = ""
    queue_ms: float = 0.0
    """Before anything was done."""
    fetch_ms: float = 0.0
    compute_ms: float = 0.0
    push_ms: float = 0.0
    """From the last layer computed until all had arrived at the decode instance."""
    computed_tokens: int = 0
    local_tokens: int = 0
    """Found in that instance's own pool."""
    peer_tokens: int = 0
    store_tokens: int = 0
    decode_local_tokens: int = 0
    """Held by the decode instance, so that they were not sent."""

    @property
    def reused_tokens(self) -> int:
        return self.local_tokens + self.peer_tokens + self.store_tokens
