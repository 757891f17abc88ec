"""What became of a prompt that was computed here."""

from __future__ import annotations

from dataclasses import dataclass

from pinyon.messages.orders import FirstToken


@dataclass(frozen=True, slots=True)
class SpanFetched:
    """One read that arrived whole."""

    source_id: str
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PrefillOutcome:
    """What this instance has computed, and what there is to learn of it."""

    first: FirstToken
    fetched_bytes: int
    spans: tuple[SpanFetched, ...]
    """Of the fetch; the last ones."""
