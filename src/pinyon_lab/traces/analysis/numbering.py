"""Block ids of any size as small numbers."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["Pieces"]

PIECE_IDS = 1 << 20
DENSE = 2
"""Ids below this many times their count are numbers already."""
SMALL = (1 << 31) - 1


class Pieces:
    """All ids of a trace, in pieces; 4 bytes an id where they are small, else 8."""

    def __init__(self) -> None:
        self._pieces: list[NDArray[np.int64] | NDArray[np.int32]] = []
        self._last = array("q")
        self._count = 0
        self._greatest = -1

    def __len__(self) -> int:
        return self._count

    def add(self, ids: Sequence[int]) -> None:
        self._last.extend(ids)
        self._count += len(ids)
        if len(self._last) >= PIECE_IDS:
            self._seal()

    def _seal(self) -> None:
        piece = np.asarray(self._last)
        greatest = int(piece.max(initial=-1))
        self._greatest = max(self._greatest, greatest)
        self._pieces.append(piece.astype(np.int32) if greatest <= SMALL else piece)
        self._last = array("q")

    def numbered(self) -> tuple[NDArray[np.int32], int]:
        """In order, each id's number, and a bound on the numbers. The pieces are gone then."""
        self._seal()
        dense = self._greatest < min(DENSE * self._count, SMALL)
        known = None if dense else _unlike(np.concatenate([_unlike(piece) for piece in self._pieces]))
        numbers, at = np.empty(self._count, np.int32), 0
        self._pieces.reverse()
        while self._pieces:
            piece = self._pieces.pop()
            part = numbers[at : at + len(piece)]
            at += len(piece)
            if known is None:
                part[:] = piece
            else:
                # needles in order are found many times faster: their neighbours are still in the processor's cache
                order = np.argsort(piece)
                part[order] = np.searchsorted(known, piece[order])
        return numbers, self._greatest + 1 if known is None else len(known)


def _unlike(values: NDArray[np.int64] | NDArray[np.int32]) -> NDArray[np.int64]:
    """Each value once, in order. By sorting: NumPy's own ``unique`` hashes, for many times the memory and time."""
    ranked = np.sort(values.astype(np.int64, copy=False))
    new = np.ones(len(ranked), bool)
    new[1:] = ranked[1:] != ranked[:-1]
    found: NDArray[np.int64] = ranked[new]
    return found
