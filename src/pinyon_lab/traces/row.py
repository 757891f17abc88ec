"""One request of a trace."""

from __future__ import annotations

from typing import NamedTuple


class TraceRow(NamedTuple):
    """No text, only ids. What a format does not tell is empty, 0 or -1."""

    time_s: float
    """Since the trace began, or any other zero."""
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    """Ids of the prompt's blocks, the last one perhaps not full; equal ids mean an equal prefix up to there."""
    kind: str = ""
    """Type of the request, as the lb's label ``kind``."""
    turn: int = 0
    """1 begins a conversation."""
    chat: str = ""
    """Of the request, or of its session where the format names no other."""
    parent: str = ""
    """The request that this one follows in its conversation."""
    user: str = ""
    output_blocks: tuple[int, ...] = ()

    @property
    def category(self) -> str:
        """As :attr:`pinyon.core.request.RequestClass.category`."""
        return f"{self.kind}/{self.turn}" if self.kind else ""
