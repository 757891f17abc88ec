"""The outcome of a prompt that was computed here."""

from __future__ import annotations

from dataclasses import dataclass

from pinyon.messages.orders import FirstToken


@dataclass(frozen=True, slots=True)
class SpanFetched:
    """A read of fetched KV that arrived whole."""

    source_id: str
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PrefillOutcome:
    """The first token of a prompt computed here, and the measurements to learn from."""

    first: FirstToken
    fetched_bytes: int
    spans: tuple[SpanFetched, ...]
    """The fetch's last spans."""
