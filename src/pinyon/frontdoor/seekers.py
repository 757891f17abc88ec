"""Requests that hold a slot of the queue while nobody is there who may serve them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pinyon.core.errors import Unavailable

__all__ = ["Seekers"]

SHARE = 4
"""One in so many slots may be held so: whoever asks for a region that is away keeps the others from nobody."""


class Seekers:
    """All on one event loop."""

    def __init__(self, slots: int) -> None:
        self._most = max(1, slots // SHARE)
        self._count = 0

    @contextmanager
    def one(self, *, chosen: bool) -> Iterator[None]:
        """It waits for somebody to come. Raises :class:`Unavailable` when too many do that were sent for regions that
        their clients have ``chosen``; others wait for what everybody waits for."""
        if not chosen:
            yield
            return
        if self._count >= self._most:
            raise Unavailable("Nobody who may serve this request is there, and many wait for that.", retry_after_s=1.0)
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1
