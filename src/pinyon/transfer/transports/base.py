"""The interface that every transport offers to the engine."""

from __future__ import annotations

from typing import Protocol

from pinyon.transfer.chains.chain import Chain, ChainOutcome
from pinyon.transfer.types.nic import Path
from pinyon.transfer.types.segment import SegmentDescriptor


class Transport(Protocol):
    """A way to move chains over the paths that the transport knows.

    The peer's queue chooses, retries and avoids paths. Methods with a body here suit a transport without endpoints."""

    def run(self, chain: Chain, path: Path) -> ChainOutcome:
        """Runs the chain in the calling thread, over an endpoint of this path that is leased or set up on demand.

        The transport claims the chain before it touches memory; if ``chain.claim(abort)`` says no, it returns any
        outcome. When it returns, it has let go of local memory and called ``chain.unclaim()``. It does not call
        ``chain.finish``. A failed WRITE leaves the link's id in ``chain.fence``; a chain that comes with a fence gets a
        fresh link that replaces it. If the peer closed an idle endpoint before any byte of an answer came, that
        endpoint is replaced once, silently. Raises nothing on purpose."""
        ...

    def probe(self, remote: SegmentDescriptor, path: Path, deadline: float) -> bool:
        """Returns whether the path is alive. Sets up a fresh endpoint, kept if there is room for the next chain."""
        return True

    def forget(self, remote: SegmentDescriptor, path: Path) -> None:
        """Closes the idle endpoints of a path that has failed."""
        return

    def maintain(self, now: float) -> None:
        """Closes endpoints that were not used for ``idle_s`` seconds; called about once a second."""
        return

    @property
    def endpoints(self) -> int:
        """The number of endpoints that are open towards peers."""
        ...

    def close(self) -> None:
        """Frees everything; the caller has aborted the chains that still ran."""
        return
