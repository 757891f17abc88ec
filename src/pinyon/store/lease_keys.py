"""The keys by which readers read what they leased: each opens its lease's ranges, until the lease is over."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pinyon.core.errors import PinyonError
from pinyon.runtime.logging import get_logger
from pinyon.store.background import Background
from pinyon.transfer import Access, Grant, Region, RegionDescriptor, TransferEngine

END_S = 30.0
"""Bound on ending all that is under way when the owner stops."""

_log = get_logger("lease-keys")


class LeaseKeys:
    """Of the leases on one region. On one event loop."""

    def __init__(self, engine: TransferEngine, region: Region) -> None:
        self._engine = engine
        self._region = region
        self._grants: dict[int, Grant] = {}
        self._duties = Background()

    def __len__(self) -> int:
        """Leases that have a key."""
        return len(self._grants)

    def give(self, lease_id: int, ranges: Iterable[tuple[int, int]], lease_s: float) -> RegionDescriptor:
        """The key to ``(offset, length)`` ranges in bytes, for at most ``lease_s`` seconds.

        Raises:
            TransferLimitReached: too many keys are given.
        """
        grant = self._engine.grant(self._region, ranges, Access.READ, lifetime_s=lease_s)
        self._grants[lease_id] = grant
        return grant.descriptor()

    def end(self, lease_id: int, over: Callable[[], None]) -> bool:
        """The lease is over: its key is refused from now on. False: it was over before.

        ``over`` is called when nobody reads by the key any more: at once, unless a read is under way. It is not called
        if a read cannot be stopped (a defect, logged): the memory stays leased then.
        """
        grant = self._grants.pop(lease_id, None)
        if grant is None:
            return False
        if self._engine.revoke_now(grant):
            over()
        else:
            self._duties.run(self._shut_out(grant, over), "lease end")
        return True

    async def _shut_out(self, grant: Grant, over: Callable[[], None]) -> None:
        try:
            await self._engine.revoke_async(grant)
        except PinyonError:
            _log.exception("a reader cannot be shut out; what it leased is not used again")
        else:
            over()

    async def close(self) -> None:
        """Wait until the reads are over whose leases have ended. Bounded."""
        await self._duties.close(END_S)
