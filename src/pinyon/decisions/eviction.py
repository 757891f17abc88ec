"""What comes from outside to the eviction of an instance's pool: another policy, and what was learned elsewhere."""

from __future__ import annotations

from typing import Any

from pinyon.eviction import EVICTION_POLICIES
from pinyon.paging import BlockPool


class Eviction:
    """Its calls change which blocks go, so they are inputs of the journal. A fit that a thread has made counts from the
    call of :meth:`adopt` on, and not from when it was ready: made again, the decisions see it at the same place."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._switches = 0

    @property
    def switches(self) -> int:
        """Policies that were given up."""
        return self._switches

    def switch(self, choice: str, now_s: float) -> None:
        """Another policy, with what is held. O(blocks). Raises ``ValueError`` for an unknown one."""
        policy = EVICTION_POLICIES.make(choice)
        self._pool.switch(policy, now_s, None if self._pool.below is None else EVICTION_POLICIES.make(choice))
        self._switches += 1

    def adopt(self, fit: Any, switches: int, both: bool = False) -> bool:
        """What the policy learned that was in force after so many switches: the one of the pool's keys, or of ``both``
        tiers' if there are two. False: it is not in force any more."""
        if switches != self._switches:
            return False
        (self._pool.of_all if both else self._pool.eviction).adopt(fit)
        return True
