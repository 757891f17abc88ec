"""How long the steps of an engine take: a formula, and its numbers for some model on some machine.

The numbers are data (``profiles/NAME.json``, or a file of the user's with the same fields), each with where it comes
from: ``stated`` by the source, or ``assumed`` by us and why.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pinyon.core.errors import InvalidArgument

__all__ = ["EngineProfile", "built_in_profiles", "load_profile"]

_FOLDER = Path(__file__).with_name("profiles")
FILE_BYTES_MAX = 65_536
SECONDS_MAX = 3600.0


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """Coefficients in seconds; see :meth:`step_seconds`. Raises :class:`InvalidArgument` naming the field."""

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

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "str":
                if not isinstance(value, str):
                    raise _bad(f"{field.name} must be a text")
            elif isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= SECONDS_MAX:
                raise _bad(f"{field.name} must be seconds from 0 to {SECONDS_MAX:.0f}, got {value!r}")

    def step_seconds(self, chunks: Iterable[tuple[int, int]], contexts: Iterable[int]) -> float:
        """Length of a step of prompt chunks at ``[start, end)`` and of decoded requests that read so many tokens each.

        A mixed step takes as long as both parts one after the other; a step of nothing takes none.
        """
        chunks, contexts = list(chunks), list(contexts)
        if not chunks and not contexts:
            return 0.0
        seconds = self.step_s
        for start, end in chunks:
            seconds += self.prefill_token_s * (end - start) + self.prefill_pair_s * (end * end - start * start)
        if contexts:
            seconds += self.decode_step_s + self.decode_request_s * len(contexts)
            seconds += self.decode_kv_token_s * math.fsum(contexts)
        return seconds


def built_in_profiles() -> list[str]:
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


def load_profile(name: str) -> EngineProfile:
    """``name``: a built-in profile, or a file (has a ``/`` or ends in ``.json``). Raises :class:`InvalidArgument`."""
    if "/" in name or name.endswith(".json"):
        path = Path(name)
    elif name in built_in_profiles():
        path = _FOLDER / f"{name}.json"
    else:
        raise _bad(f"no such profile; known: {', '.join(built_in_profiles())}, or a JSON file")
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
        values: Any = json.loads(data) if len(data) <= FILE_BYTES_MAX else None
    except OSError as error:
        raise _bad(f"cannot read {name}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise _bad(f"{name} is not valid JSON") from None
    if not isinstance(values, dict):
        raise _bad(f"{name} must hold a JSON object of at most {FILE_BYTES_MAX} bytes")
    known = {field.name for field in fields(EngineProfile)}
    if values.keys() != known:
        wrong = ", ".join(sorted(values.keys() ^ known))
        raise _bad(f"{name} must have exactly the fields {', '.join(sorted(known))}; missing or unknown: {wrong}")
    return EngineProfile(**values)


def _bad(message: str) -> InvalidArgument:
    return InvalidArgument(f"engine profile: {message}", field="engine_profile")
