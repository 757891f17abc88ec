"""The length of an engine's steps: a formula, and its numbers for some model on some machine.

The numbers are data (``engines/NAME.json``, or a user's file with the same fields), each with its origin: ``stated`` by
the source, or ``assumed`` by us, with the reason."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pinyon.profiles.files import check_values, names_in, profile_from

_FOLDER = Path(__file__).with_name("engines")
KIND = "engine profile"
SECONDS_MAX = 3600.0


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """An engine's coefficients in seconds: see :meth:`seconds`. Raises :class:`InvalidArgument` naming the field."""

    source: str
    stated: str
    assumed: str
    step_s: float
    """Seconds that every step takes."""
    prefill_token_s: float
    """Seconds for every prompt token computed."""
    prefill_pair_s: float
    """Seconds of attention per unit of ``end² - start²``, for a chunk at positions ``[start, end)``."""
    decode_step_s: float
    """Seconds that every decoding step takes to read the weights."""
    decode_request_s: float
    """Seconds for every request of the batch."""
    decode_kv_token_s: float
    """Seconds for every token whose KV the batch reads."""
    decode_shared_share: float = 1.0
    """The cost of a shared token of KV for each further request, as a share; at 1, sharing gains nothing. The *whole*
    batch shares the token (FEATHER §3.2), or a part of it if the kernel reads each group's shared tokens once."""

    def __post_init__(self) -> None:
        check_values(self, KIND, (0, SECONDS_MAX), decode_shared_share=(0, 1))

    def kv_read(self, kv_tokens: float, again: float) -> float:
        """Returns the number of a batch's ``kv_tokens`` that count, if ``again`` of them were already read for another
        request in the same step."""
        return kv_tokens - (1.0 - self.decode_shared_share) * again

    def seconds(self, chunks: Iterable[tuple[int, int]], decodes: int, kv_tokens: float) -> float:
        """Returns the length of a step of prompt chunks at ``[start, end)`` and of ``decodes`` requests that read
        ``kv_tokens`` in total. A mixed step takes as long as both parts one after the other; an empty step takes 0
        s."""
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
    """Loads a built-in profile, or a file (has a ``/`` or ends in ``.json``). Raises :class:`InvalidArgument`."""
    return profile_from(EngineProfile, name, _FOLDER, KIND)
