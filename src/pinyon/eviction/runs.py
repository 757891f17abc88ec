"""Runs of a request's blocks that are all held already or all missing."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence


def runs(blocks: Sequence[int], inside: Container[int]) -> Iterator[tuple[int, int, bool]]:
    """Yields ``(start, end, known)`` for each run of neighbours that are all ``inside`` or all not, the last run first.

    Between two runs, the caller may change which of the blocks of the run just taken are inside."""
    end = len(blocks)
    while end:
        known = blocks[end - 1] in inside
        start = end - 1
        while start and (blocks[start - 1] in inside) is known:
            start -= 1
        yield start, end, known
        end = start
