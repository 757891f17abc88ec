"""Stop strings over a stream of text.

The text is given out as soon as it cannot be the beginning of a stop string; from a match on, everything is dropped
(the stop string itself too). Of several matches the one that *ends* first counts, since generation would have stopped
there; of those that end together, the longest. The result does not depend on how the text is cut into deltas.
"""

from __future__ import annotations

from collections.abc import Iterable


class StopMatcher:
    """Matches the stop strings of one request. With none it passes everything through."""

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(stops)
        if not all(self._stops):
            raise ValueError("a stop string must not be empty")
        self._beginnings = [_Beginning(stop) for stop in self._stops]
        self._held = ""
        self._matched = False

    @property
    def matched(self) -> bool:
        return self._matched

    def push(self, delta: str, *, ends: bool = True) -> tuple[str, bool]:
        """``(text that is safe to give out, whether a stop string has matched)``. After a match: ``("", True)``.

        Without ``ends`` nothing matches that ends in ``delta``; what ends later and begins in it still does.
        """
        if self._matched:
            return "", True
        if not self._stops:
            return delta, False
        text = self._held + delta
        # A match that ends inside what was held would have been found then, or did not count.
        stops = self._stops if ends else ()
        found = [(at + len(stop), at) for stop in stops if (at := text.find(stop, self._first(stop))) >= 0]
        if found:
            _, start = min(found)
            self._matched = True
            self._held = ""
            return text[:start], True
        for beginning in self._beginnings:
            beginning.push(delta)
        keep = max(beginning.length for beginning in self._beginnings)
        cut = len(text) - keep
        self._held = text[cut:]
        return text[:cut], False

    def flush(self) -> str:
        """What was held back, when the stream ends without a match."""
        held, self._held = self._held, ""
        return held

    def _first(self, stop: str) -> int:
        """Where one may begin that ends in new text."""
        return max(0, len(self._held) - len(stop) + 1)


class _Beginning:
    """How much of one stop string the text so far ends in: ``length``, less than all of it (Knuth, Morris, Pratt: Fast
    Pattern Matching in Strings, 1977). A character takes the same time however long the strings are that it is held
    for: they are the client's choice."""

    __slots__ = ("_borders", "_stop", "length")

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self.length = 0
        self._borders = borders = [0, 0]
        """By length of a beginning: its longest end that is a shorter beginning."""
        border = 0
        for char in stop[1:]:
            while border and stop[border] != char:
                border = borders[border]
            border += stop[border] == char
            borders.append(border)

    def push(self, text: str) -> None:
        stop, borders, length = self._stop, self._borders, self.length
        if not length and stop[0] not in text:
            return
        for char in text:
            while length and stop[length] != char:
                length = borders[length]
            length += stop[length] == char
            if length == len(stop):  # it did not count
                length = borders[length]
        self.length = length
