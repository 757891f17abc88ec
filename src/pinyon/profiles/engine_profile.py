"""How long the steps of an engine take: a formula, and its numbers for some model on some machine.

The numbers are data (``engines/NAME.json``, or a file of the user's with the same fields), each with where it comes
from: ``stated`` by the source, or ``assumed`` by us and why.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path

from pinyon.core.errors import InvalidArgument
from pinyon.profiles.files import names_in, profile_from

_FOLDER = Path(__file__).with_name("engines")
SECONDS_MAX = 3600.0


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """Coefficients in seconds; see :meth:`seconds`. Raises :class:`InvalidArgument` naming the field."""

    source: str
    stated: str
    assumed: str
    step_s: float
    """Every step."""
    prefill_token_s: float
    """Every prompt token computed."""
    prefill_pair_s: float
    """Attention: times ``end² - start²`` of a chunk at positions ``[start, end)``."""
    decode_step_s: float
    """Every step that decodes: reading the weights."""
    decode_request_s: float
    """Every request of the batch."""
    decode_kv_token_s: float
    """Every token whose KV the batch reads."""
    decode_shared_share: float = 1.0
    """Of a token whose KV is shared by the *whole* batch (FEATHER §3.2), or by some of it where the kernel reads what
    each group shares once: what each further request pays for it. 1: as much as the first, nothing is gained."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "str":
                if not isinstance(value, str):
                    raise _bad(f"{field.name} must be a text")
            elif field.name == "decode_shared_share":
                if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
                    raise _bad(f"{field.name} must be from 0 to 1, got {value!r}")
            elif isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= SECONDS_MAX:
                raise _bad(f"{field.name} must be seconds from 0 to {SECONDS_MAX:.0f}, got {value!r}")

    def kv_read(self, kv_tokens: float, again: float) -> float:
        """Tokens that count, of those that a batch reads together, if so many of them were read for another one of its
        requests in the same step."""
        return kv_tokens - (1.0 - self.decode_shared_share) * again

    def seconds(self, chunks: Iterable[tuple[int, int]], decodes: int, kv_tokens: float) -> float:
        """Length of a step of prompt chunks at ``[start, end)`` and of so many decoded requests that read so many
        tokens together.

        A mixed step takes as long as both parts one after the other; a step of nothing takes none.
        """
        seconds, any_chunk = self.step_s, False
        for start, end in chunks:
            any_chunk = True
            seconds += self.prefill_token_s * (end - start) + self.prefill_pair_s * (end * end - start * start)
        if decodes:
            seconds += self.decode_step_s + self.decode_request_s * decodes + self.decode_kv_token_s * kv_tokens
        return seconds if any_chunk or decodes else 0.0


def built_in_profiles() -> list[str]:
    return names_in(_FOLDER)


def load_profile(name: str) -> EngineProfile:
    """``name``: a built-in profile, or a file (has a ``/`` or ends in ``.json``). Raises :class:`InvalidArgument`."""
    return profile_from(EngineProfile, name, _FOLDER, "engine profile")


def _bad(message: str) -> InvalidArgument:
    return InvalidArgument(f"engine profile: {message}", field="engine_profile")
