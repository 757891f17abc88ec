"""The keys by which readers read leased objects: each opens its lease's ranges until the lease is over."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pinyon.core.errors import PinyonError
from pinyon.runtime.logging import get_logger
from pinyon.store.background import Background
from pinyon.transfer import Access, Grant, Region, RegionDescriptor, TransferEngine

END_S = 30.0
"""The seconds that ending all running reads may take when the owner stops."""

_log = get_logger("lease-keys")


class LeaseKeys:
    """The keys of the leases on one region. For one event loop."""

    def __init__(self, engine: TransferEngine, region: Region) -> None:
        self._engine = engine
        self._region = region
        self._grants: dict[int, Grant] = {}
        self._duties = Background()

    def __len__(self) -> int:
        """Counts the leases that have a key."""
        return len(self._grants)

    def __contains__(self, lease_id: int) -> bool:
        return lease_id in self._grants

    def give(self, lease_id: int, ranges: Iterable[tuple[int, int]], lease_s: float) -> RegionDescriptor:
        """Returns a key to ``(offset, length)`` ranges in bytes, for at most ``lease_s`` seconds.

        Raises TransferLimitReached if too many keys are given."""
        grant = self._engine.grant(self._region, ranges, Access.READ, lifetime_s=lease_s)
        self._grants[lease_id] = grant
        return grant.descriptor()

    def renew(self, lease_id: int, lease_s: float) -> bool:
        """Lets the lease's key open its ranges for ``lease_s`` seconds from now. Returns False if it is over."""
        grant = self._grants.get(lease_id)
        return grant is not None and self._engine.extend(grant, lease_s)

    def end(self, lease_id: int, over: Callable[[], None]) -> bool:
        """Ends the lease: its key is refused from now on. Returns False if the lease was over before.

        ``over`` is called once nobody reads by the key any more: at once, unless a read is under way. If a read cannot
        be stopped (a defect, logged), ``over`` is not called and the memory stays leased."""
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
        """Waits until reads under ended leases are over, for ``END_S`` at most."""
        await self._duties.close(END_S)
