"""What a server says its answer took, read from the end of it."""

from __future__ import annotations

from typing import Any, Final

from pydantic_core import from_json

from pinyon.core.request import Usage

TAIL_BYTES: Final = 4 << 10
"""Of an answer, at its end: there the usage stands in all of OpenAI's objects, and in the last events of a stream."""
TOKENS_MAX: Final = 1 << 40
DEPTH_MAX: Final = 16
"""Objects in it."""
_NAMES = (
    ("prompt_tokens", "completion_tokens", "prompt_tokens_details"),
    ("input_tokens", "output_tokens", "input_tokens_details"),
)


def read_usage(tail: bytes) -> Usage | None:
    """The last usage in there; None where there is none, or none that makes sense."""
    end = len(tail)
    for _ in range(4):  # a stream's last events may have ``"usage": null``
        at = tail.rfind(b'"usage"', 0, end)
        if at < 0:
            return None
        end = at
        start = tail.find(b"{", at, at + 16)
        if start >= 0 and (used := _used(_object(tail, start))) is not None:
            return used
    return None


def _object(tail: bytes, start: int) -> Any:
    """The JSON object that begins there; None if it is none."""
    end = start
    for _ in range(DEPTH_MAX):  # it ends with one of its first closing braces, as it holds few objects and no texts
        end = tail.find(b"}", end) + 1
        if not end:
            return None
        try:
            return from_json(tail[start:end])
        except ValueError:
            continue
    return None


def _used(usage: Any) -> Usage | None:
    if type(usage) is not dict:
        return None
    for prompt_name, completion_name, details_name in _NAMES:
        prompt = _count(usage.get(prompt_name))
        if prompt is not None:
            details = usage.get(details_name)
            cached = _count(details.get("cached_tokens")) if type(details) is dict else None
            return Usage(prompt, _count(usage.get(completion_name)) or 0, min(prompt, cached or 0))
    return None


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value <= TOKENS_MAX else None
