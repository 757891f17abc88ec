"""What the HTTP front door offers, by path."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol

from pinyon.frontdoor.auth import Client
from pinyon.frontdoor.head import Head
from pinyon.http.answer import Reply

__all__ = ["Route", "Routes"]


Page = Callable[[Head], tuple[bytes, bytes]]
"""Body and content type of an answer that is known at once."""
Generate = Callable[[Head, bytes | bytearray, Reply], Awaitable[int]]


class Route(NamedTuple):
    label: str
    """Of the metric."""
    method: str
    guarded: bool
    """An API key is asked for, where there are any."""
    place: str
    """For the log: one of ours, never what a client made up."""
    page: Page | None = None
    generate: Generate | None = None
    queued: bool = False
    """It needs a place in the queue."""


class Routes(Protocol):
    @property
    def places(self) -> tuple[str, ...]:
        """Of all routes."""
        ...

    def find(self, path: str) -> Route | None: ...

    def nowhere(self, path: str) -> str:
        """What is so where nothing is found, in a sentence; empty: there is nothing to say."""
        ...

    def check_place(self, client: Client) -> None:
        """Of a route that is queued. Raises :class:`ResourceExhausted` if there is none: then there is no need to read
        a body."""
