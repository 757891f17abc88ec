"""Which policy chooses what an instance's pool evicts, while it runs."""

from __future__ import annotations

from pinyon.eviction import EVICTION_POLICIES
from pinyon.paging import BlockPool

__all__ = ["Eviction"]


class Eviction:
    """What comes from outside, and so is an input of the journal."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    def switch(self, choice: str, now_s: float) -> None:
        """Another policy, with what is held. O(blocks). Raises ``ValueError`` for an unknown one."""
        self._pool.switch(EVICTION_POLICIES.make(choice), now_s)
