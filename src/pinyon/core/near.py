"""Suggestions of the known word that a user may have meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

WORD_CHARS_MAX = 256
"""The maximum length of a word that is compared; a longer one has no similar word."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns `` (did you mean 'nearest'?)`` for a message that names ``word``; empty if no known word is similar.

    Hyphens count as underscores, and capital letters as small ones."""
    if len(word) > WORD_CHARS_MAX:
        return ""
    spelled = {_plain(each): each for each in known}
    near = get_close_matches(_plain(word), list(spelled), n=1)
    return f" (did you mean {spelled[near[0]]!r}?)" if near else ""


def _plain(word: str) -> str:
    return word.lower().replace("_", "-")
