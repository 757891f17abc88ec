"""One request of a trace."""

from __future__ import annotations

from typing import NamedTuple


class TraceRow(NamedTuple):
    """A request as ids, without text. What a format does not tell is empty, 0 or -1."""

    time_s: float
    """The time since the trace began, or since any other zero."""
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    """The ids of the prompt's blocks, the last of which may not be full. Equal ids mean equal prefixes up to there."""
    kind: str = ""
    """The type of the request, as the load balancer's label ``kind``."""
    turn: int = 0
    """The turn in the conversation, from 1."""
    chat: str = ""
    """The id of the request, or of its session if the format has no other."""
    parent: str = ""
    """The request that this one follows in its conversation."""
    user: str = ""
    output_blocks: tuple[int, ...] = ()

    @property
    def category(self) -> str:
        """The category, as :attr:`pinyon.core.request.RequestClass.category`."""
        return f"{self.kind}/{self.turn}" if self.kind else ""
