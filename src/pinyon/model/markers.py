"""A search for the texts of added tokens within another text, in one pass."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

DEPTH_MAX = 64
"""The maximum depth of nested groups, which Python's compiler of regular expressions processes by recursion."""
MARKS_PER_CHAR = 4
"""The number of places where a marker may begin that cost as much as a tokenizer's work on one character."""
MARKER_CHARS = 4
"""The number of characters whose tokenization costs as much as one marker."""


class Markers:
    """Markers to search for. ``pattern`` finds the longest marker at each place; a text without ``marks`` has none."""

    def __init__(self, texts: Iterable[str]) -> None:
        """Takes the markers; at least one of ``texts`` must not be empty, and empty ones are ignored."""
        by_first = _by_first(texts)
        self.marks = tuple(_common(group) for group in by_first.values())
        self.pattern = re.compile(_tree([text for group in by_first.values() for text in group]))
        self._split = re.compile(f"({self.pattern.pattern})").split

    def work(self, texts: Iterable[str]) -> int:
        """Returns the cost of a search in ``texts`` in characters, rounded up; 0 if there is no marker.

        The cost is independent of what the search finds. A hundred markers may begin at one place: this counts only the
        first characters that they share."""
        return -(-sum(text.count(mark) for text in texts for mark in self.marks) // MARKS_PER_CHAR)

    def split(self, text: str) -> list[str]:
        """Splits a text into the part before the first marker, the marker, the part up to the second one, and so on."""
        return self._split(text)


def _tree(texts: Sequence[str], depth: int = 0) -> str:
    """Returns a regular expression that narrows the texts down by each character, longest first.

    It is as fast for a thousand texts as for one; a flat alternation tries all of them at each place."""
    if depth == DEPTH_MAX:
        return f"(?:{'|'.join(map(re.escape, sorted(texts, key=len, reverse=True)))})"
    ways = []
    for group in _by_first(texts).values():
        common = _common(group)
        ends = [text[len(common) :] for text in group]
        ways.append(re.escape(common) + (_tree(ends, depth + 1) if any(ends) else ""))
    if "" in texts:
        ways.append("")
    return ways[0] if len(ways) == 1 else f"(?:{'|'.join(ways)})"


def _by_first(texts: Iterable[str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for text in texts:
        if text:
            groups.setdefault(text[0], []).append(text)
    return groups


def _common(texts: Sequence[str]) -> str:
    """Returns the longest common prefix."""
    first, last = min(texts), max(texts)
    size = next((at for at, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), len(first))
    return first[:size]
