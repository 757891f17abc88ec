"""What a transport runs: a chain of slices with one peer, one direction, one completion; and how it can end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

from pinyon.transfer.chains.slicing import ChainPlan, Slice
from pinyon.transfer.memory.region import Region
from pinyon.transfer.types.path import Path
from pinyon.transfer.types.request import Opcode, Reason, TransferStatus
from pinyon.transfer.types.segment import SegmentDescriptor

_NONE: frozenset[Path] = frozenset()
_NO_TRANSPORT: frozenset[str] = frozenset()


class Outcome(NamedTuple):
    """How a chain ended, for all its slices alike, except those with a code in ``refusals``."""

    status: TransferStatus
    reason: Reason = Reason.NONE
    refusals: bytes | None = None
    """One ``Reason`` number per slice, 0 = completed; only with status COMPLETED."""


DONE = Outcome(TransferStatus.COMPLETED)
"""All of it, nothing refused. Whoever moved a small request says it with this very object."""
UNDER_WAY = Outcome(TransferStatus.PENDING)
"""Of what was begun and goes on when its answer comes (``Endpoint.begin``)."""
SHUTDOWN = Outcome(TransferStatus.CANCELLED, Reason.SHUTDOWN)
"""The engine closes, or the local region is unregistered."""
GONE = Outcome(TransferStatus.CANCELLED, Reason.CANCELLED)
"""The chain ended before it was claimed; changes nothing."""
LOST = Outcome(TransferStatus.FAILED, Reason.CONNECTION_LOST)
BAD_BYTES = Outcome(TransferStatus.FAILED, Reason.PROTOCOL)
NO_CONNECTION = Outcome(TransferStatus.FAILED, Reason.CONNECT_FAILED)
STALLED = Outcome(TransferStatus.TIMEOUT, Reason.STALLED)
LATE = Outcome(TransferStatus.TIMEOUT, Reason.DEADLINE)
NO_ROOM = Outcome(TransferStatus.TIMEOUT, Reason.DEADLINE)
"""As many endpoints as may be were in use until the deadline, or for longer than a chain waits that may go elsewhere.
Unlike ``LATE``, from which it is told by identity, this says nothing about the path."""


class Chain:
    """A chain's run state: waiting → running → waiting (another path) → … → done, exactly once.

    A transport claims the chain *after* it has an endpoint and before it touches memory: a chain that still waits for a
    thread, a name lookup or a handshake can therefore be ended at once by anybody, while a running one ends only when
    its runner has let go of the memory. That is why a late byte never lands after the final status.
    """

    __slots__ = (
        *("_abort", "_lock", "_on_done", "_running", "_stop", "attempts", "deadline", "done", "elsewhere", "failure"),
        *("fence", "full", "local_location", "nbytes", "opcode", "regions", "remote", "remote_location", "slices"),
        "tried",
    )

    def __init__(
        self, plan: ChainPlan, regions: dict[bytes, Region], deadline: float, on_done: Callable[[Chain, Outcome], None]
    ) -> None:
        self.remote: SegmentDescriptor = plan.remote
        self.opcode: Opcode = plan.opcode
        self.slices: list[Slice] = plan.slices
        self.nbytes: int = plan.nbytes
        self.local_location: str = plan.local_location
        self.remote_location: str = plan.remote_location
        self.regions = regions
        """Local regions by key, pinned until the end."""
        self.deadline = deadline
        """By the engine's clock."""
        self.fence = 0
        """Id of the link on which an attempt failed after it may have sent payload of a WRITE: the next attempt's link
        must replace it (``dial(replaces=...)``), so that nothing of the first one lands after the second. 0 = none."""
        self.attempts = 0
        self.tried: frozenset[Path] = _NONE
        """Paths that failed under this chain."""
        self.full = _NO_TRANSPORT
        """Transports that had no endpoint for it in good time."""
        self.elsewhere = False
        """A transport that was not full may serve it too: it need not wait for an endpoint until its deadline."""
        self.failure: Outcome | None = None
        """How the last attempt failed."""
        self.done = False
        self._running = False
        self._stop: Outcome | None = None
        self._abort: Callable[[], None] | None = None
        self._on_done = on_done
        self._lock = threading.Lock()

    def claim(self, abort: Callable[[], None]) -> bool:
        """Start to touch memory. False: the chain has ended meanwhile, leave it alone.

        ``abort`` may be called from any thread until ``unclaim`` or ``finish``; it makes the runner stop soon and must
        not block.
        """
        with self._lock:
            if self.done:
                return False
            self._running = True
            self._abort = abort
            return True

    def unclaim(self) -> bool:
        """Memory is let go; ``abort`` will not be called any more. False: the chain was stopped, so it was called."""
        with self._lock:
            self._abort = None
            if self._stop is not None:
                return False
            self._running = False
            return True

    def stop(self, outcome: Outcome) -> None:
        """Cancel or expire. A waiting chain ends here; a running one is aborted and ends in its runner's ``finish``."""
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
        """Stop it as the engine's close and a region's end do."""
        self.stop(SHUTDOWN)

    @property
    def expired(self) -> bool:
        """It was stopped because its deadline passed."""
        return self._stop is not None and self._stop.reason is Reason.DEADLINE

    @property
    def stopped(self) -> bool:
        """Somebody called ``stop``: no further attempt."""
        return self._stop is not None

    def interrupt(self) -> None:
        """The path it runs on is gone: make the runner stop now instead of at the stall limit, to go on elsewhere."""
        with self._lock:
            if self._running and self._abort is not None:
                self._abort()

    def finish(self, outcome: Outcome) -> None:
        """End the chain; nothing happens if it has ended. Memory must have been let go."""
        with self._lock:
            if self.done:
                return
            self.done = True
            self._abort = None
            if self._stop is not None and outcome.status is not TransferStatus.COMPLETED:
                outcome = self._stop
        self._on_done(self, outcome)
