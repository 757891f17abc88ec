"""The cost of computing a prompt, and how much of the prompt was reused."""

from __future__ import annotations

from typing import NamedTuple


class PrefillReport(NamedTuple):
    """A report of the instance that computed the prompt, in milliseconds and tokens. Fetching may overlap computing."""

    prefill_instance_id: str = ""
    queue_ms: float = 0.0
    """The time before any work began."""
    fetch_ms: float = 0.0
    compute_ms: float = 0.0
    push_ms: float = 0.0
    """The time from the last computed layer until all layers had arrived at the decode instance."""
    computed_tokens: int = 0
    local_tokens: int = 0
    """Tokens found in that instance's own pool."""
    peer_tokens: int = 0
    store_tokens: int = 0
    decode_local_tokens: int = 0
    """Tokens held by the decode instance, so that they were not sent."""

    @property
    def reused_tokens(self) -> int:
        return self.local_tokens + self.peer_tokens + self.store_tokens
