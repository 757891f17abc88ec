"""What of a request's blocks is held already, run by run."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence


def runs(blocks: Sequence[int], inside: Container[int]) -> Iterator[tuple[int, int, bool]]:
    """``(start, end, whether they are inside)`` of neighbours that are alike, the last ones first. Who takes a run
    may change what is inside, of its blocks."""
    end = len(blocks)
    while end:
        known = blocks[end - 1] in inside
        start = end - 1
        while start and (blocks[start - 1] in inside) is known:
            start -= 1
        yield start, end, known
        end = start
