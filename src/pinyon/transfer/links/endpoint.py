"""Endpoints: a link to a peer and what goes with it. One chain uses it at a time, any number one after another."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod

from mypy_extensions import mypyc_attr

from pinyon.transfer.chains.chain import BAD_BYTES, LATE, LOST, STALLED, UNDER_WAY, Chain, ChainOutcome
from pinyon.transfer.links.dialer import Link
from pinyon.transfer.links.stream import DeadlineReached, Stalled
from pinyon.transfer.memory.region import Region
from pinyon.transfer.types.errors import WireError
from pinyon.transfer.types.nic import Path
from pinyon.transfer.types.request import Opcode
from pinyon.transfer.types.segment import PeerId

_log = logging.getLogger(__name__)

EndpointKey = tuple[PeerId, Path]
"""The peer that an endpoint belongs to, and the path that it uses."""


class TryAgain(Exception):
    """The endpoint broke in mid-transfer, but a fresh one may do: the peer ended its link, or took a grant back."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Endpoint(ABC):
    """A link to a peer and what goes with it. One chain at a time uses it; other threads may only call ``abort``."""

    __slots__ = ("aborted", "answered", "free_since", "key", "leaving", "link", "reused", "shelf", "visited")

    def __init__(self, link: Link) -> None:
        self.link = link
        self.aborted = False
        """True once the endpoint is of no use any more."""
        self.answered = False
        """True if any byte of an answer has arrived for the present chain."""
        self.reused = False
        """True if the endpoint has been idle, so that the peer may have closed it meanwhile."""
        self.key: EndpointKey | None = None
        """The endpoint's peer and path, from the time that it is kept."""
        self.free_since = 0.0
        """The time of the last release by the engine's clock."""
        self.shelf: list[Endpoint] = []
        """The free endpoints of the same path, from the time that it is kept."""
        self.visited = False
        """SIEVE's mark: True if the endpoint was used again since the hand passed it."""
        self.leaving = False
        """True if the path failed while the endpoint was in use: the release closes it."""

    def is_open(self) -> bool:
        """Returns whether an idle endpoint is still open, as far as can be known without asking the peer."""
        return not self.aborted and not self.leaving

    def wake(self) -> bool:
        """Marks a free endpoint as used again; returns False if it is not open any more."""
        if not self.is_open():
            return False
        self.reused, self.answered, self.visited = True, False, True
        return True

    def take(self) -> bool:
        """Takes a free endpoint off its shelf; returns False if a thread has taken it meanwhile."""
        try:
            self.shelf.remove(self)
        except ValueError:
            return False
        return True

    def prepare(self, chain: Chain) -> None:
        """Prepares for a chain before its memory is touched. Raises like ``exchange``."""
        return

    @abstractmethod
    def exchange(self, chain: Chain) -> ChainOutcome:
        """Moves the chain, which is claimed. An exception or a failure leaves the endpoint unusable.

        Raises TryAgain, WireError, OSError (the link broke), Stalled or DeadlineReached."""

    def move(
        self, opcode: Opcode, region: Region, offset: int, key: bytes, remote_offset: int, nbytes: int, deadline: float
    ) -> ChainOutcome | None:
        """Moves one range between a local region of host memory and what ``key`` opens, without a chain.

        Local memory of up to 64 KiB is touched only while the memory table's lock says that the region is registered.
        So nobody waits for this move, and only ``abort`` stops it. For more bytes the caller holds a pin. Returns
        ``SHUTDOWN`` if the region is not registered (any more), None if nothing was done and a chain must ask first.
        Raises like ``exchange``. An exception or a failure leaves the endpoint unusable."""
        outcome = self.begin(opcode, region, offset, key, remote_offset, nbytes, deadline)
        return self.wait(deadline) if outcome is UNDER_WAY else outcome

    def begin(
        self, opcode: Opcode, region: Region, offset: int, key: bytes, remote_offset: int, nbytes: int, deadline: float
    ) -> ChainOutcome | None:
        """Begins :meth:`move`; returns what that returns, or ``UNDER_WAY`` if there is an answer to wait for.

        After ``UNDER_WAY`` call ``wait``, or for up to 64 KiB ``proceed`` when the link's socket can be read."""
        return None

    def wait(self, deadline: float) -> ChainOutcome:
        """Waits for the answer to what :meth:`begin` began and returns the outcome. Raises like ``move``."""
        raise NotImplementedError

    def proceed(self) -> ChainOutcome | None:
        """Returns that outcome if the answer is here, else None. Does not block. Raises like ``move``."""
        raise NotImplementedError

    def abort(self) -> None:
        """Makes the endpoint's user stop soon; from any thread, any number of times."""
        self.aborted = True
        self.link.stream.abort()

    def close(self, *, hard: bool) -> None:
        """Closes the endpoint, which then touches no memory; after a failure ``hard``, so nothing trickles on."""
        self.link.stream.close(hard=hard)


EXPECTED = (TryAgain, Stalled, DeadlineReached, WireError, OSError)
"""Errors that ``Endpoint.exchange`` and ``Endpoint.move`` raise."""


def failure_of(error: Exception, endpoint: Endpoint) -> tuple[ChainOutcome, bool]:
    """Returns the outcome of a run that raised one of ``EXPECTED``, and whether a fresh endpoint may do.

    It may, for instance, if the peer can have closed this one while it was idle."""
    if isinstance(error, TryAgain):
        return LOST, True
    if isinstance(error, Stalled):
        return STALLED, False
    if isinstance(error, DeadlineReached):
        return LATE, False
    if isinstance(error, WireError):
        _log.info("a peer broke the protocol of a transfer link: %s", error)
        return BAD_BYTES, False
    return LOST, endpoint.reused and not endpoint.answered
