"""What a transport runs: a chain of slices with one peer, one direction, one completion."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple, Protocol

from pinyon.transfer.request import Opcode, Reason, TransferStatus
from pinyon.transfer.segment import SegmentDescriptor
from pinyon.transfer.slicing import ChainPlan, Slice
from pinyon.transfer.stats import StatsRecorder
from pinyon.transfer.transports.memory import Region

__all__ = ["Chain", "Meter", "Outcome", "Transport"]


class Meter(StatsRecorder):
    """The engine's counters with the lock that guards them."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class Outcome(NamedTuple):
    """How a chain ended, for all its slices alike, except those with a code in ``refusals``."""

    status: TransferStatus
    reason: Reason = Reason.NONE
    refusals: bytes | None = None
    """One ``Reason`` number per slice, 0 = completed; only with status COMPLETED."""


class Chain:
    """A chain's run state: waiting → running → waiting (a retry) → … → done, exactly once.

    Whoever runs the chain claims it *after* it has a connection and before it touches memory: a chain that still waits
    for a thread, a name lookup or a handshake can therefore be ended at once by anybody, while a running one ends only
    when its runner has let go of the memory. That is why a late byte never lands after the final status.
    """

    __slots__ = (
        "_abort",
        "_lock",
        "_on_done",
        "_running",
        "_stop",
        "deadline",
        "done",
        "nbytes",
        "opcode",
        "regions",
        "remote",
        "slices",
    )

    def __init__(
        self,
        plan: ChainPlan,
        regions: dict[bytes, Region],
        deadline: float,
        on_done: Callable[[Chain, Outcome], None],
    ) -> None:
        self.remote: SegmentDescriptor = plan.remote
        self.opcode: Opcode = plan.opcode
        self.slices: list[Slice] = plan.slices
        self.nbytes: int = plan.nbytes
        self.regions = regions
        """Local regions by key, pinned until the end."""
        self.deadline = deadline
        """``time.monotonic()`` seconds."""
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


class Transport(Protocol):
    """Runs chains towards the peers it can reach. Part 2 adds rdma and shm beside tcp and local."""

    name: str

    def submit(self, chain: Chain) -> None:
        """Queue the chain and return at once; it is finished later, from another thread."""
        ...

    def run(self, chain: Chain) -> None:
        """Run the chain in the calling thread; it is finished on return."""
        ...

    def close(self) -> None:
        """End all threads and connections; chains that are left end as CANCELLED."""
        ...
