"""A link to a peer and what goes with it: the unit that transports keep, lease to one chain at a time, and replace."""

from __future__ import annotations

from abc import ABC, abstractmethod

from mypy_extensions import mypyc_attr

from pinyon.transfer.chains.chain import UNDER_WAY, Chain, Outcome
from pinyon.transfer.links.dialer import Link
from pinyon.transfer.memory.region import Region
from pinyon.transfer.types.path import Path
from pinyon.transfer.types.request import Opcode
from pinyon.transfer.types.segment import PeerId

EndpointKey = tuple[PeerId, Path]
"""Whose an endpoint is, and over which path."""


class TryAgain(Exception):
    """The endpoint broke in mid-transfer, but a fresh one may do: the peer ended its link, or took a grant back."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Endpoint(ABC):
    """A link to a peer and what goes with it. One chain at a time uses it; only ``abort`` may be called from
    others."""

    __slots__ = ("aborted", "answered", "key", "leaving", "link", "reused")

    def __init__(self, link: Link) -> None:
        self.link = link
        self.aborted = False
        """It is of no use any more."""
        self.answered = False
        """Did any byte of an answer arrive for the present chain?"""
        self.reused = False
        """It has been idle, so the peer may have closed it meanwhile."""
        self.key: EndpointKey | None = None
        """Whose it is, from the time that it is kept."""
        self.leaving = False
        """Its path failed while it was in use: the release closes it."""

    def is_open(self) -> bool:
        """After it sat idle, as far as can be known without asking the peer."""
        return not self.aborted and not self.leaving

    def prepare(self, chain: Chain) -> None:
        """What is to be done before the chain's memory is touched. Raises like ``exchange``."""
        return

    @abstractmethod
    def exchange(self, chain: Chain) -> Outcome:
        """Move the chain, which is claimed. An exception or a failure leaves the endpoint unusable. Raises TryAgain,
        WireError, OSError (the link broke), Stalled, DeadlineReached."""

    def move(
        self, opcode: Opcode, region: Region, offset: int, key: bytes, remote_offset: int, nbytes: int, deadline: float
    ) -> Outcome | None:
        """Move one range between a local region, of host memory, and what ``key`` opens, without a chain.

        Local memory of up to 64 KiB is touched only while the memory table's lock says that the region is registered;
        so nobody waits for this and nobody stops it but by ``abort``. The outcome ``SHUTDOWN``: it is not registered
        (any more). Of more bytes the caller holds a pin. None: nothing was done, a chain must ask first. An exception
        or a failure leaves the endpoint unusable.

        Raises: like ``exchange``.
        """
        outcome = self.begin(opcode, region, offset, key, remote_offset, nbytes, deadline)
        return self.wait(deadline) if outcome is UNDER_WAY else outcome

    def begin(
        self, opcode: Opcode, region: Region, offset: int, key: bytes, remote_offset: int, nbytes: int, deadline: float
    ) -> Outcome | None:
        """:meth:`move` without the wait for an answer: what it says, or ``UNDER_WAY``: ``wait``, or of up to 64 KiB
        ``proceed`` when the link's socket can be read."""
        return None

    def wait(self, deadline: float) -> Outcome:
        """How what was begun has ended. Raises like ``move``."""
        raise NotImplementedError

    def proceed(self) -> Outcome | None:
        """The same, if its answer is here; None: not yet. Does not block. Raises like ``move``."""
        raise NotImplementedError

    def abort(self) -> None:
        """Make its user stop soon; from any thread, any number of times."""
        self.aborted = True
        self.link.stream.abort()

    def close(self, *, hard: bool) -> None:
        """On return it touches no memory. ``hard``: after a failure, so that nothing trickles on to the peer."""
        self.link.stream.close(hard=hard)
