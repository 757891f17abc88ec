"""A chain, the unit that a transport runs: slices with one peer, one direction, one completion; and how it can end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

from pinyon.transfer.chains.slicing import ChainPlan
from pinyon.transfer.memory.region import Region
from pinyon.transfer.types.nic import Path
from pinyon.transfer.types.request import Reason, TransferStatus

_NONE: frozenset[Path] = frozenset()


class ChainOutcome(NamedTuple):
    """The end of a chain, for all its slices alike, except those with a code in ``refusals``."""

    status: TransferStatus
    reason: Reason = Reason.NONE
    refusals: bytes | None = None
    """One ``Reason`` number per slice, 0 = completed; only with status COMPLETED."""


DONE = ChainOutcome(TransferStatus.COMPLETED)
"""All slices completed, none refused. Code that moves a small request says so with this very object."""
UNDER_WAY = ChainOutcome(TransferStatus.PENDING)
"""The move was begun, and goes on when its answer comes (``Endpoint.begin``)."""
SHUTDOWN = ChainOutcome(TransferStatus.CANCELLED, Reason.SHUTDOWN)
"""The engine closes, or the local region is unregistered."""
GONE = ChainOutcome(TransferStatus.CANCELLED, Reason.CANCELLED)
"""The chain ended before it was claimed. This outcome changes nothing."""
LOST = ChainOutcome(TransferStatus.FAILED, Reason.CONNECTION_LOST)
BAD_BYTES = ChainOutcome(TransferStatus.FAILED, Reason.PROTOCOL)
INTERNAL = ChainOutcome(TransferStatus.FAILED, Reason.INTERNAL)
NO_CONNECTION = ChainOutcome(TransferStatus.FAILED, Reason.CONNECT_FAILED)
STALLED = ChainOutcome(TransferStatus.TIMEOUT, Reason.STALLED)
LATE = ChainOutcome(TransferStatus.TIMEOUT, Reason.DEADLINE)
NO_ROOM = ChainOutcome(TransferStatus.TIMEOUT, Reason.DEADLINE)
"""All endpoints were in use until the deadline. Unlike ``LATE``, from which it is told by identity, this says nothing
about the path."""


class Chain:
    """A chain's run state: waiting → running → waiting (another path) → … → done, exactly once.

    A transport claims the chain *after* it has an endpoint and before it touches memory. So a chain that still waits
    for a thread, a name lookup or a handshake can be ended at once by any thread. A running chain ends only when its
    runner has let go of the memory, so a late byte never lands after the final status."""

    __slots__ = (
        *("_abort", "_lock", "_on_done", "_running", "_stop", "attempts", "checksum", "deadline", "done"),
        *("failure", "fence", "local_location", "nbytes", "opcode", "regions", "remote", "remote_location", "slices"),
        "tried",
    )

    def __init__(
        self,
        plan: ChainPlan,
        regions: dict[bytes, Region],
        deadline: float,
        on_done: Callable[[Chain, ChainOutcome], None],
    ) -> None:
        self.remote, self.opcode, self.slices, self.nbytes, self.local_location, self.remote_location = plan
        self.regions = regions
        """Local regions by key, pinned until the end."""
        self.deadline = deadline
        """The deadline by the engine's clock."""
        self.checksum = True
        """False if its payload needs no checksum on its way: the caller has one."""
        self.fence = 0
        """Id of the link on which an attempt failed after it may have sent payload of a WRITE; 0 if none.

        The next attempt's link must replace it (``dial(replaces=...)``): no byte of the first may land later."""
        self.attempts = 0
        self.tried: frozenset[Path] = _NONE
        """Paths that failed under this chain."""
        self.failure: ChainOutcome | None = None
        """The outcome of the last failed attempt."""
        self.done = False
        self._running = False
        self._stop: ChainOutcome | None = None
        self._abort: Callable[[], None] | None = None
        self._on_done = on_done
        self._lock = threading.Lock()

    def claim(self, abort: Callable[[], None]) -> bool:
        """Claims the chain before its memory is touched. False: it has ended, or is to end, and is to be left alone.

        ``abort`` may be called from any thread until ``unclaim`` or ``finish``; it makes the runner stop soon and must
        not block."""
        with self._lock:
            if self.done or self._stop is not None:
                return False
            self._running = True
            self._abort = abort
            return True

    def unclaim(self) -> bool:
        """Ends the claim: memory is let go, ``abort`` is not called any more. False means that ``stop`` called it."""
        with self._lock:
            self._abort = None
            if self._stop is not None:
                return False
            self._running = False
            return True

    def stop(self, outcome: ChainOutcome) -> None:
        """Cancels or expires the chain. A waiting chain ends here; a running one is aborted and ends in ``finish``."""
        with self._lock:
            if self.done or self._stop is not None:
                return
            if self._running:
                self._stop = outcome
                if self._abort is not None:
                    self._abort()  # under the lock, so the runner cannot hand its connection to another chain meanwhile
                return
            self.done = True
        self._on_done(self, outcome)

    def shut(self) -> None:
        """Stops the chain as the engine's close and a region's end do."""
        self.stop(SHUTDOWN)

    @property
    def expired(self) -> bool:
        """True if the chain was stopped because its deadline passed."""
        return self._stop is not None and self._stop.reason is Reason.DEADLINE

    @property
    def stopped(self) -> bool:
        """True if ``stop`` was called while the chain ran: no further attempt is made."""
        return self._stop is not None

    def interrupt(self) -> None:
        """Aborts a running chain whose path is gone: it stops now, not at the stall limit, to go on elsewhere."""
        with self._lock:
            if self._running and self._abort is not None:
                self._abort()

    def finish(self, outcome: ChainOutcome) -> None:
        """Ends the chain, or does nothing if it has ended. Memory must have been let go."""
        with self._lock:
            if self.done:
                return
            self.done = True
            self._abort = None
            if self._stop is not None and outcome.status is not TransferStatus.COMPLETED:
                outcome = self._stop
        self._on_done(self, outcome)
