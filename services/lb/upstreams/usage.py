"""What a server says its answer took, read from the end of it."""

from __future__ import annotations

import json
from typing import Any, Final, NamedTuple

__all__ = ["TAIL_BYTES", "Used", "read_usage"]

TAIL_BYTES: Final = 4 << 10
"""Of an answer, at its end: there the usage stands in all of OpenAI's objects, and in the last events of a stream."""
TOKENS_MAX: Final = 1 << 40
_DECODER = json.JSONDecoder()
_NAMES = (
    ("prompt_tokens", "completion_tokens", "prompt_tokens_details"),
    ("input_tokens", "output_tokens", "input_tokens_details"),
)


class Used(NamedTuple):
    """In tokens."""

    prompt: int
    completion: int
    cached: int


def read_usage(tail: bytes) -> Used | None:
    """The last usage in there; None where there is none, or none that makes sense."""
    text = tail.decode("utf-8", "replace")
    end = len(text)
    for _ in range(4):  # a stream's last events may have ``"usage": null``
        at = text.rfind('"usage"', 0, end)
        if at < 0:
            return None
        end = at
        start = text.find("{", at, at + 16)
        if start < 0:
            continue
        try:
            found, _ = _DECODER.raw_decode(text, start)
        except (ValueError, RecursionError):
            continue
        if (used := _used(found)) is not None:
            return used
    return None


def _used(usage: Any) -> Used | None:
    if type(usage) is not dict:
        return None
    for prompt_name, completion_name, details_name in _NAMES:
        prompt = _count(usage.get(prompt_name))
        if prompt is not None:
            details = usage.get(details_name)
            cached = _count(details.get("cached_tokens")) if type(details) is dict else None
            return Used(prompt, _count(usage.get(completion_name)) or 0, min(prompt, cached or 0))
    return None


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value <= TOKENS_MAX else None
