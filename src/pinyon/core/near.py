"""Which known word somebody may have meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

WORD_CHARS_MAX = 256
"""Of a word that is compared; nothing is like a longer one."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """What to put behind ``word`` in a message: `` (did you mean 'nearest'?)``, or nothing where no known word is near.
    Hyphens and underscores are the same, and so are small and capital letters."""
    if len(word) > WORD_CHARS_MAX:
        return ""
    spelled = {_plain(each): each for each in known}
    near = get_close_matches(_plain(word), list(spelled), n=1)
    return f" (did you mean {spelled[near[0]]!r}?)" if near else ""


def _plain(word: str) -> str:
    return word.lower().replace("_", "-")
