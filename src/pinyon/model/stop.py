"""Stop strings over a stream of text.

Text is returned as soon as it cannot be the beginning of a stop string. From a match on, all text is dropped, including
the stop string. Of several matches, the one that *ends* first counts, since generation would have stopped there; of
those that end together, the longest counts. The result does not depend on how the text is cut into deltas."""

from __future__ import annotations

from collections.abc import Iterable


class StopMatcher:
    """The matcher of one request's stop strings. Without stop strings all text passes."""

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(stops)
        if not all(self._stops):
            raise ValueError("a stop string must not be empty")
        self._beginnings = [_Beginning(stop) for stop in self._stops]
        self._held = ""
        self.matched = False

    def push(self, delta: str, *, ends: bool = True) -> tuple[str, bool]:
        """Returns ``(text that is safe to emit, whether a stop string has matched)``; ``("", True)`` after a match.

        Without ``ends``, a match that ends in ``delta`` does not count; one that begins in it and ends later does."""
        if self.matched:
            return "", True
        if not self._stops:
            return delta, False
        text = self._held + delta
        # A match that ends inside the held text was found earlier, or did not count.
        stops = self._stops if ends else ()
        found = [(at + len(stop), at) for stop in stops if (at := text.find(stop, self._first(stop))) >= 0]
        if found:
            _, start = min(found)
            self.matched = True
            self._held = ""
            return text[:start], True
        for beginning in self._beginnings:
            beginning.push(delta)
        keep = max(beginning.length for beginning in self._beginnings)
        cut = len(text) - keep
        self._held = text[cut:]
        return text[:cut], False

    def flush(self) -> str:
        """Returns the held text when the stream ends without a match."""
        held, self._held = self._held, ""
        return held

    def _first(self, stop: str) -> int:
        """Returns the first position at which a match that ends in the new text may begin."""
        return max(0, len(self._held) - len(stop) + 1)


class _Beginning:
    """The length of the longest proper prefix of a stop string with which the text so far ends.

    The algorithm is that of Knuth, Morris and Pratt (Fast Pattern Matching in Strings, 1977). A character takes the
    same time however long the stop strings are, which clients choose."""

    __slots__ = ("_borders", "_stop", "length")

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self.length = 0
        self._borders = borders = [0, 0]
        """The length of the longest suffix that is also a shorter prefix, for each length of a prefix."""
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
            if length == len(stop):  # a match that did not count
                length = borders[length]
        self.length = length
