"""Room as SGLang counts it: what requests share counts for each of them (FEATHER §5.2.1).

FEATHER explains SGLang's small batches by "double-counting shared prefix tokens toward the token budget", which vLLM
avoids. Here the budget is the room for KV: those that run fill it when all that they have, each counted in full, does.
"""

from __future__ import annotations

from pinyon.batching.policy import BatchRequest, BlockNeed, Holdings, StepSeen
from pinyon.core.block_keys import BlockKey
from pinyon_lab.policies.bounded import Bounded

__all__ = ["DoubleCounting"]


class DoubleCounting:
    """See :class:`pinyon.batching.policy.Holdings`, where nobody takes over anything, and
    :class:`pinyon_lab.policies.bounded.AdmissionBound`: what those that run share is taken off the room as often as
    it was saved. Memory and time: O(reusable keys) of those that run."""

    def __init__(self, holdings: Holdings) -> None:
        self._holdings = holdings
        self._shared: dict[int, tuple[BlockKey, ...]] = {}
        """Keys of each that runs which others may have taken over from it, or it from others."""
        self._users: dict[BlockKey, int] = {}
        self._saved = 0
        """Blocks that would be there twice, were nothing shared."""

    def need(self, request: BatchRequest) -> BlockNeed:
        return BlockNeed(0, request.blocks)

    def behind(self, number: int) -> int:
        return self._holdings.behind(number)

    def within(self, slots: int, room_blocks: int) -> Bounded:
        return Bounded(slots, room_blocks - self._saved)

    def admitted(self, request: BatchRequest) -> None:
        users = self._users
        self._shared[request.number] = keys = request.block_keys[: request.reusable]
        for key in keys:
            count = users.get(key, 0)
            users[key] = count + 1
            self._saved += count > 0

    def ended(self, number: int) -> None:
        users = self._users
        for key in self._shared.pop(number):
            count = users[key] - 1
            if count:
                users[key] = count
                self._saved -= 1
            else:
                del users[key]

    def observe(self, step: StepSeen) -> None:
        """It does not depend on that."""
