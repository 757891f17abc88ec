"""Requests that hold a slot of the queue while nobody is there who may serve them."""

from __future__ import annotations

from pinyon.core.errors import Unavailable

SHARE = 4
"""One in so many slots may be held so: whoever asks for a region that is away keeps the others from nobody."""


class Seekers:
    """All on one event loop."""

    def __init__(self, slots: int) -> None:
        self._most = max(1, slots // SHARE)
        self._count = 0

    def begin(self, *, chosen: bool) -> None:
        """One waits for somebody to come, until :meth:`end`. Raises :class:`Unavailable` when too many do that were
        sent for regions that their clients have ``chosen``; others wait for what everybody waits for."""
        if self._count >= self._most and chosen:
            raise Unavailable("Nobody who may serve this request is there, and many wait for that.", retry_after_s=1.0)
        self._count += chosen

    def end(self, *, chosen: bool) -> None:
        """It waits no more."""
        self._count -= chosen
