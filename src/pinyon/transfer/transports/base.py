"""What every transport offers to the engine."""

from __future__ import annotations

from typing import Protocol

from pinyon.transfer.chains.chain import Chain, Outcome
from pinyon.transfer.types.path import Path
from pinyon.transfer.types.segment import SegmentDescriptor


class Transport(Protocol):
    """Moves chains over the paths it knows. Paths are chosen, retried and avoided by the peer's queue. What has a body
    here is for one without endpoints."""

    name: str

    def run(self, chain: Chain, path: Path) -> Outcome:
        """Run the chain in the calling thread, over an endpoint of this path (leased, or set up on demand).

        Claims the chain before it touches memory (``chain.claim(abort)``; if that says no, returns any outcome) and has
        let go of local memory when it returns; ``chain.unclaim()`` was then called. Does not call ``chain.finish``.
        A failed WRITE leaves the link's id in ``chain.fence``; a chain that comes with a fence gets a fresh link that
        replaces it. An endpoint that sat idle and turns out to be closed by the peer before any byte of an answer is
        replaced once, silently. Raises nothing on purpose.
        """
        ...

    def probe(self, remote: SegmentDescriptor, path: Path, deadline: float) -> bool:
        """Is the path alive? Sets up a fresh endpoint and keeps it, if there is room, for the next chain."""
        return True

    def forget(self, remote: SegmentDescriptor, path: Path) -> None:
        """The path failed: close its idle endpoints."""
        return

    def maintain(self, now: float) -> None:
        """About once a second: close what was not used for ``idle_s``."""
        return

    @property
    def endpoints(self) -> int:
        """Open towards peers."""
        ...

    def close(self) -> None:
        """Free everything; chains that still run are aborted by the caller before."""
        return
