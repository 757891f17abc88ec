"""Registered memory, shared by all transports: who may touch which bytes, and who is touching them right now.

Code that moves bytes holds a *pin* meanwhile: on the region for our own transfer, on the grant for a peer's. Both
``unregister`` and ``revoke`` refuse new pins at once, wait for the present ones, and after a grace period abort their
holders. So when they have returned, nothing touches the memory any more for that reason."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from math import inf

from pinyon.core.clock import Clock
from pinyon.transfer.memory.buffers import open_buffer
from pinyon.transfer.memory.grant import Grant
from pinyon.transfer.memory.region import Access, Region
from pinyon.transfer.memory.staging_pool import StagingPool
from pinyon.transfer.types.errors import InvalidTransfer, TransferError, TransferLimitReached
from pinyon.transfer.types.limits import TransferLimits
from pinyon.transfer.types.request import Opcode, Reason
from pinyon.transfer.types.segment import Range
from pinyon.transfer.types.spans import Spans, merge_ranges

SMALL_BYTES = 64 << 10
"""Largest request that needs no pin: its bytes are copied while the table is locked."""
STAGING_BYTES = 64 << 20
"""Size of a staging pool: as much as the largest frame has."""
_READ, _WRITE = int(Access.READ), int(Access.WRITE)


class MemoryTable:
    """The registered regions and the grants by key, with pins. All methods are thread-safe."""

    def __init__(
        self,
        limits: TransferLimits = TransferLimits(),  # noqa: B008 - it is frozen
        clock: Clock = time.monotonic,
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        """Creates a table; pinned host memory is ``staging_bytes`` per direction once device memory is registered."""
        self._limits = limits
        self._clock = clock
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # entered by its lock, at a fifth of the cost
        self._regions: dict[bytes, Region] = {}
        self._open: dict[bytes, Grant] = {}
        """Grants that peers may use, by the key that they name."""
        self._grants_of: dict[Region, set[Grant]] = {}
        self.grants = 0
        """Number of grants given and not taken back, without the regions' own."""
        self._ranges = 0
        """Number of open ranges of these grants."""
        self._deadlines: list[tuple[float, int, Grant]] = []
        self._numbers = itertools.count()
        self.staging_out = StagingPool(staging_bytes, self._take_back, clock)
        """The pool for chains that this engine starts."""
        self.staging_in = StagingPool(staging_bytes, self._take_back, clock)
        """The pool for what peers ask for."""
        self.on_unregister: list[Callable[[Region], None]] = []
        """Callbacks for when nothing here uses a region any more, before ``unregister`` returns; they must not raise.

        A transport then takes back what it made of the region for our own use (a memory registration)."""
        self.on_revoke: list[Callable[[Grant], None]] = []
        """Callbacks for when a key opens nothing any more, before ``revoke`` returns; they must not raise.

        A transport then takes back what it told peers for the key (an adapter's key, an address), perhaps twice."""

    def register(self, buffer: object, location: str | None, access: Access) -> Region:
        """Registers a writable, contiguous, non-empty buffer.

        Raises InvalidTransfer for another buffer or a bad location, TransferLimitReached for too many regions."""
        region, driver = open_buffer(buffer, location, Access(access))
        region.descriptor()  # checks the location
        with self._lock:
            if len(self._regions) >= self._limits.max_regions:
                raise TransferLimitReached(f"{self._limits.max_regions} regions are registered")
            if driver is not None:
                for pool in (self.staging_out, self.staging_in):
                    pool.use(driver)
            self._regions[region.key] = region
            whole = Grant(region, region.key, Spans((0,), (region.length,)), region.access, inf, given=False)
            self._open[region.key] = whole
            self._grants_of[region] = {whole}
        return region

    # --- grants ---

    def grant(
        self, region: Region, ranges: Iterable[tuple[int, int]], access: Access, lifetime_s: float | None = None
    ) -> Grant:
        """Opens ranges of a region to the holders of a new key, for ``lifetime_s`` seconds.

        Raises InvalidTransfer for ranges outside the region or none, no right, no time, or an unregistered region, and
        TransferLimitReached for too many grants, or ranges of all grants."""
        spans = merge_ranges(ranges, region.length)
        if access is Access.NONE:
            raise InvalidTransfer("a grant without a right", field="access")
        if lifetime_s is not None and not lifetime_s > 0:
            raise InvalidTransfer("a lifetime is positive", field="lifetime_s")
        expires_s = inf if lifetime_s is None else self._clock() + lifetime_s
        grant = Grant(region, None, spans, Access(access), expires_s, given=True)
        count = len(spans.starts)
        with self._lock:
            if not region.alive:
                raise InvalidTransfer("the region is not registered", field="region")
            if self.grants >= self._limits.max_grants:
                raise TransferLimitReached(f"{self._limits.max_grants} grants are open")
            if self._ranges + count > self._limits.max_grant_ranges:
                raise TransferLimitReached(f"{self._ranges} ranges are open; {count} more are too many")
            self.grants += 1
            self._ranges += count
            self._open[grant.key] = grant
            self._grants_of[region].add(grant)
            if expires_s < inf:
                self._expires(grant)
        return grant

    def extend(self, grant: Grant, lifetime_s: float) -> bool:
        """Moves the end of a grant to ``lifetime_s`` seconds from now. Returns False if it is over."""
        with self._lock:
            now_s = self._clock()
            if not grant.alive or grant.expires_s <= now_s:
                return False
            grant.expires_s = now_s + lifetime_s
            self._expires(grant)
        return True

    def _expires(self, grant: Grant) -> None:
        """Notes when the grant expires. Lock held."""
        if len(self._deadlines) > 2 * self.grants + 64:  # mostly grants that were revoked before their time
            self._deadlines = [each for each in self._deadlines if each[2].alive]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (grant.expires_s, next(self._numbers), grant))

    def _shut(self, grant: Grant) -> None:
        """Shuts the grant: from now on its key opens nothing. Lock held."""
        if grant.alive:
            grant.alive = False
            self._open.pop(grant.key, None)
            self._forget_if_idle(grant)
            if grant.given:
                self.grants -= 1
                self._ranges -= len(grant.spans.starts)

    def _forget_if_idle(self, grant: Grant) -> None:
        """Forgets a shut grant once nobody uses it: ``unregister`` waits for that. Lock held."""
        if grant.region.alive and not grant._holders:
            self._grants_of[grant.region].discard(grant)

    def revoke_now(self, grant: Grant) -> bool:
        """Refuses the key from now on, quickly. True: nothing uses it any more. False: ``revoke`` sees to that."""
        with self._lock:
            self._shut(grant)
            if grant.lent or grant._holders:
                return False
        self._take_back_grant(grant)
        return True

    def revoke(self, grant: Grant, grace_s: float) -> None:
        """Refuses the key from now on. On return no peer touches anything by it any more. Idempotent.

        Operations in flight may finish within ``grace_s`` seconds. Then their links are cut, which takes at most
        ``grace_s`` or 5 s, whichever is longer. Raises TransferError if an operation could not be stopped (a defect):
        the memory must not be reused."""
        with self._lock:
            self._shut(grant)
        self._take_back_grant(grant)
        if not self._settle([grant], grace_s):
            raise TransferError("operations on the granted ranges do not end; do not reuse their memory")

    def expire(self, now_s: float) -> int:
        """Shuts the grants whose time is up, and returns their number.

        Their keys are refused without that: this frees their places and takes back what transports told peers."""
        overdue: list[Grant] = []
        with self._lock:
            while self._deadlines and self._deadlines[0][0] <= now_s:
                grant = heapq.heappop(self._deadlines)[2]
                if grant.alive and grant.expires_s <= now_s:  # not extended meanwhile
                    self._shut(grant)
                    overdue.append(grant)
        for grant in overdue:
            self._take_back_grant(grant)
        return len(overdue)

    def _take_back_grant(self, grant: Grant) -> None:
        for take_back in self.on_revoke:
            take_back(grant)

    # --- the end of a region ---

    def _take_back(self, region: Region) -> None:
        for take_back in self.on_unregister:
            take_back(region)

    def unregister(self, region: Region, grace_s: float) -> None:
        """Forgets the region. On return nothing of this engine touches its memory any more. Idempotent.

        Operations in flight may finish within ``grace_s`` seconds. Then they are aborted, which takes at most
        ``grace_s`` or 5 s, whichever is longer. Raises TransferError if an operation could not be stopped (a defect):
        the memory must not be reused."""
        with self._lock:
            region.alive = False
            known = self._regions.pop(region.key, None) is not None
            grants = list(self._grants_of.get(region, ()))
            for grant in grants:
                self._shut(grant)
        for grant in grants:
            self._take_back_grant(grant)
        idle = self._settle([region, *grants], grace_s)
        if known:
            self._take_back(region)
        if not idle:
            raise TransferError("operations on the region do not end; do not reuse its memory")
        if known:
            with self._lock:
                del self._grants_of[region]
            region.release()
            if region.device is not None:
                for pool in (self.staging_out, self.staging_in):
                    pool.leave()

    def _settle(self, pinned: Sequence[Region | Grant], grace_s: float) -> bool:
        """Waits until none of these is pinned, and aborts the holders after the grace; returns whether all ended."""
        with self._lock:
            if self._wait_unpinned(pinned, grace_s):
                return True
            aborts = [abort for each in pinned for abort in each._holders.values()]
        for abort in aborts:
            abort()
        with self._lock:
            return self._wait_unpinned(pinned, max(grace_s, 5.0))

    def _wait_unpinned(self, pinned: Sequence[Region | Grant], timeout_s: float) -> bool:
        deadline = self._clock() + timeout_s
        while any(each._holders for each in pinned):
            remaining = deadline - self._clock()
            if remaining <= 0:
                return False
            self._changed.wait(remaining)
        return True

    def regions(self) -> list[Region]:
        with self._lock:
            return list(self._regions.values())

    def get(self, key: bytes) -> Region | None:
        return self._regions.get(key)  # a dict read is atomic; a region that dies after it fails to pin

    def pin(self, regions: Iterable[Region], holder: object, abort: Callable[[], None]) -> bool:
        """Pins all of these regions, or none if one is gone; returns whether it did. ``abort`` must not block."""
        wanted = tuple(regions)
        with self._lock:
            for region in wanted:
                if not region.alive:
                    return False
            for region in wanted:
                region._holders[holder] = abort
        return True

    def unpin(self, pinned: Iterable[Region | Grant], holder: object) -> None:
        with self._lock:
            for each in pinned:
                each._holders.pop(holder, None)
                if not each.alive:
                    if isinstance(each, Grant):
                        self._forget_if_idle(each)
                    self._changed.notify_all()

    def admit(
        self, opcode: int, ranges: list[Range], holder: object, abort: Callable[[], None], *, host_only: bool = False
    ) -> tuple[list[Region | None], bytes | None, set[Grant]]:
        """Checks what a peer asks for, and pins the grants of what is allowed (``host_only``: and in host memory).

        Returns the region per range (None = refused), the refusal codes (None = nothing refused) and the pinned grants,
        which the caller unpins. Nothing may be touched before this has said yes."""
        right = _READ if opcode == Opcode.READ else _WRITE
        found: list[Region | None] = []
        codes = bytearray(len(ranges))
        pinned: set[Grant] = set()
        now_s = self._clock()
        last_key: bytes | None = None
        grant: Grant | None = None
        region: Region | None = None
        starts: tuple[int, ...] = ()
        ends: tuple[int, ...] = ()
        refusal = 0
        with self._lock:
            for position, (key, offset, length) in enumerate(ranges):
                if key != last_key:  # keys rarely change within a frame, which has hundreds of ranges: each call shows
                    last_key = key
                    grant = self._open.get(key)
                    refusal = self._refusal(grant, right, now_s, host_only)
                    if grant is not None:
                        region, (starts, ends) = grant.region, grant.spans
                code = refusal
                if not code:
                    index = bisect_right(starts, offset) - 1
                    if index < 0 or offset + length > ends[index]:
                        code = Reason.OUT_OF_RANGE
                    elif grant is not None:
                        pinned.add(grant)
                if code:
                    codes[position] = code
                    found.append(None)
                else:
                    found.append(region)
            for each in pinned:
                each._holders[holder] = abort
        return found, (bytes(codes) if any(codes) else None), pinned

    def _refusal(self, grant: Grant | None, right: int, now_s: float, host_only: bool) -> int:
        """Returns the reason why nothing may be done by this grant, or 0 if its ranges decide."""
        if grant is None or grant.expires_s <= now_s:
            return Reason.UNKNOWN_REGION
        if not grant.rights & right:
            return Reason.ACCESS_DENIED
        return Reason.OTHER_TRANSPORT if host_only and grant.region.device is not None else 0

    def opened(self, key: bytes, holder: object, abort: Callable[[], None]) -> Grant | None:
        """Returns the grant that this key opens now, pinned; None if there is none (any more)."""
        now_s = self._clock()
        with self._lock:
            grant = self._open.get(key)
            if grant is None or grant.expires_s <= now_s:
                return None
            grant._holders[holder] = abort
            return grant

    def _permit(self, right: int, key: bytes, start: int, end: int) -> Grant | None:
        """Returns the grant by which a peer may access ``[start, end)`` of host memory, or None. Lock held."""
        grant = self._open.get(key)
        if grant is None or not grant.permits(right, start, end) or grant.expires_s <= self._clock():
            return None
        return grant if grant.region.device is None else None

    # Short ways for one range. Small ranges are copied under the lock, so they need no pin.

    def put(self, key: bytes, offset: int, data: memoryview) -> bool:
        """Copies a few KiB from a peer to a region. False: not allowed (``admit`` says why), or not in host memory."""
        with self._lock:
            end = offset + len(data)
            grant = self._permit(_WRITE, key, offset, end)
            if grant is None:
                return False
            grant.region.view[offset:end] = data
            return True

    def take(self, key: bytes, offset: int, into: memoryview) -> bool:
        """Copies a few KiB of a region for a peer. False: not allowed (``admit`` says why), or not in host memory."""
        with self._lock:
            end = offset + len(into)
            grant = self._permit(_READ, key, offset, end)
            if grant is None:
                return False
            into[:] = grant.region.view[offset:end]
            return True

    def load(self, region: Region, offset: int, into: memoryview) -> bool:
        """Copies a few KiB of a region of host memory for ourselves. False: it is not registered any more."""
        with self._lock:
            if not region.alive:
                return False
            into[:] = region.view[offset : offset + len(into)]
            return True

    def store(self, region: Region, offset: int, data: memoryview) -> bool:
        """Copies a few KiB into a region of host memory for ourselves. False: it is not registered any more."""
        with self._lock:
            if not region.alive:
                return False
            region.view[offset : offset + len(data)] = data
            return True
