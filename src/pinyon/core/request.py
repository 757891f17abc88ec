"""What a client asks for, as plain values."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from pinyon.core.errors import InvalidArgument

__all__ = ["FinishReason", "Role", "SamplingParams", "Usage"]

MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 256


class Role(StrEnum):
    """What an instance does: compute prompts, generate tokens, or both; or hold KV objects for others."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"
    STORE = "store"

    @property
    def prefills(self) -> bool:
        return self is Role.PREFILL or self is Role.MIXED

    @property
    def decodes(self) -> bool:
        return self is Role.DECODE or self is Role.MIXED


class FinishReason(StrEnum):
    """Why a generation ended: ``stop`` is EOS or a stop string, ``length`` is max_tokens or the context's end."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen.

    ``temperature`` 0 is greedy. Sampling is a pure function of (logits, ``seed``, index of the generated token), so a
    request that is resumed elsewhere goes on with the same tokens. ``top_k`` 0 and ``top_p`` 1 are off.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = field(default=())
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens <= 0:
            raise InvalidArgument(f"max_tokens must be at least 1, got {self.max_tokens}", field="max_tokens")
        if not 0.0 <= self.temperature <= 2.0:
            raise InvalidArgument(f"temperature must be in [0, 2], got {self.temperature}", field="temperature")
        if self.top_k < 0:
            raise InvalidArgument(f"top_k must be 0 (off) or positive, got {self.top_k}", field="top_k")
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidArgument(f"top_p must be in (0, 1], got {self.top_p}", field="top_p")
        if not 0 <= self.seed < 2**64:
            raise InvalidArgument(f"seed must be an unsigned 64-bit number, got {self.seed}", field="seed")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidArgument(f"at most {MAX_STOP_STRINGS} stop strings, got {len(self.stop)}", field="stop")
        for text in self.stop:
            if not text or len(text.encode("utf-8", "surrogatepass")) > MAX_STOP_BYTES:
                raise InvalidArgument(f"a stop string must have 1 to {MAX_STOP_BYTES} bytes", field="stop")


@dataclass(frozen=True)
class Usage:
    """Token counts of one finished request. ``cached_tokens`` are prompt tokens whose KV was reused, not computed."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
