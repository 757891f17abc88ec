"""Stop strings over a stream of text.

The text is given out as soon as it cannot be the beginning of a stop string; from a match on, everything is dropped
(the stop string itself too). Of several matches the one that *ends* first counts, since generation would have stopped
there; of those that end together, the longest. The result does not depend on how the text is cut into deltas.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["StopMatcher"]


class StopMatcher:
    """Matches the stop strings of one request. With none it passes everything through."""

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(stops)
        if not all(self._stops):
            raise ValueError("a stop string must not be empty")
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
        keep = self._longest_beginning(text)
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

    def _longest_beginning(self, text: str) -> int:
        """Length of the longest end of ``text`` that is a proper beginning of a stop string."""
        best = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(text)), best, -1):
                if text.endswith(stop[:size]):
                    best = size
                    break
        return best
