"""What the steps of a simulated engine have decoded, in all."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DecodeSums"]


@dataclass(slots=True)
class DecodeSums:
    steps: int = 0
    """That have decoded anything."""
    tokens: int = 0
    seconds: float = 0.0
    """Without what prompts took that were computed in the same steps."""
    kv_tokens: float = 0.0
    """Whose KV was read, as the engine's profile counts them where a whole batch shares some."""

    def add(self, steps: int, requests: int, seconds: float, kv_tokens: float) -> None:
        """So many steps, in which that many requests got a token each."""
        self.steps += steps
        self.tokens += steps * requests
        self.seconds += seconds
        self.kv_tokens += kv_tokens
