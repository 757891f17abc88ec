"""The result of a look-up in the block index: who holds how much of one prompt's beginning.

A set of holders is an ``int`` with a bit per holder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, Protocol

from librt.vecs import vec
from mypy_extensions import i64

FEW_RUNS: Final = 4
"""A match of at most so many runs is searched run by run for a holder, or a mask of holders."""


class Holder(Protocol):
    """A holder of blocks; its ``bit`` comes from :meth:`BlockIndex.add`."""

    @property
    def bit(self) -> int: ...


class PrefixMatch:
    """The holders of a prompt's beginning, and how much of it each holds.

    ``runs`` are ``(first block, mask of holders)`` where the set of holders changes. Every block before ``blocks`` has
    a holder and the one after has none. Neither is ever changed."""

    __slots__ = ("_all", "_extents", "_leading", "_soon", "blocks", "runs")

    def __init__(self, runs: Sequence[tuple[int, int]], blocks: int, soon: PrefixMatch | None = None) -> None:
        """Takes the runs of a look-up. ``soon``: see :attr:`soon`; None if holders expect nothing."""
        self.runs = runs
        self.blocks = blocks
        self._soon = soon
        self._leading: dict[int, int] | None = None
        self._all = 0
        self._extents: dict[tuple[int, int, int | None], int] | None = None
        """Extents found, by ``(first block, mask of who may be asked, most spans)``: most readers of a placement hold
        nothing of the prompt, so they all ask the same."""

    @property
    def soon(self) -> PrefixMatch:
        """The match that includes what holders expect to hold when a new request's turn comes."""
        return self if self._soon is None else self._soon

    def without_answers(self) -> PrefixMatch:
        """Returns the same match, to be kept, without the answers that this one remembers: they take memory."""
        soon = None if self._soon is None else self._soon.without_answers()
        return PrefixMatch(self.runs, self.blocks, soon)

    def held_by(self, holder: Holder) -> int:
        """Returns how many blocks the holder has without a gap from the start."""
        runs, bit = self.runs, holder.bit
        if len(runs) <= FEW_RUNS:
            for start, holders in runs:
                if not holders & bit:
                    return start
            return self.blocks
        if self._leading is None:
            self._leading = {each: end for mask, end in self._ends() for each in bits(mask)}
        return self._leading.get(bit, 0)

    def holders_of(self, block: int) -> int:
        """Returns a mask of who holds this block, before :attr:`blocks`."""
        for start, holders in reversed(self.runs):
            if start <= block:
                return holders
        return 0

    def held_by_row(self, rows: int) -> vec[i64]:
        """Returns :meth:`held_by` of all holders, by the number of their bit, below ``rows``."""
        held = vec[i64]([0] * rows)
        kept = (1 << rows) - 1
        for mask, end in self._ends():
            packed = (mask & kept).to_bytes(-(-rows // 8), "little")
            row: i64 = 0
            for byte in packed:
                bits_left: i64 = byte
                at = row
                while bits_left:
                    if bits_left & 1:
                        held[at] = end
                    bits_left >>= 1
                    at += 1
                row += 8
        return held

    def _ends(self) -> Iterator[tuple[int, int]]:
        """Yields masks of holders and the end of what they hold without a gap; a holder of nothing is in no mask."""
        if not self.runs:
            return
        unbroken = self.runs[0][1]
        for start, holders in self.runs:
            lost = unbroken & ~holders
            if lost:
                unbroken &= holders
                yield lost, start
        if unbroken:
            yield unbroken, self.blocks

    def extent(self, first_block: int, mask: int, spans_max: int | None = None) -> int:
        """Returns the end of the blocks from ``first_block`` on that are held by the sources in a mask, each by at
        least one. With ``spans_max``, it is as far as so many :meth:`spans` go."""
        if len(self.runs) <= FEW_RUNS:
            return self._extent(first_block, mask, spans_max)
        extents = self._extents
        if extents is None:
            extents = self._extents = {}
            for _, holders in self.runs:
                self._all |= holders
        asked = first_block, mask & self._all, spans_max
        end = extents.get(asked)
        if end is None:
            end = extents[asked] = self._extent(*asked)
        return end

    def _extent(self, first_block: int, mask: int, spans_max: int | None) -> int:
        runs = self.runs
        if spans_max is not None and len(runs) > spans_max:  # else there are few: at most one for each run
            spans = self.spans(first_block, self._extent(first_block, mask, None), mask, spans_max)
            return spans[-1][1] if spans else first_block
        end = first_block
        for index, (_, holders) in enumerate(runs):
            run_end = runs[index + 1][0] if index + 1 < len(runs) else self.blocks
            if run_end <= first_block:
                continue
            if not holders & mask:
                break
            end = run_end
        return end

    def spans(self, first_block: int, end_block: int, mask: int, most: int) -> list[tuple[int, int, int]]:
        """Returns spans ``(first, end, mask of who holds all of it)`` from ``first_block`` on without a gap, the first
        ``most`` of them; there are never more than runs. ``mask``: who may be asked.

        Each span goes as far as any one source does, so there are as few as possible. Requires ``end_block <=
        extent(first_block, mask)``."""
        runs = self.runs
        spans: list[tuple[int, int, int]] = []
        index = 0
        at = first_block
        while at < end_block and len(spans) < most:
            while index + 1 < len(runs) and runs[index + 1][0] <= at:
                index += 1
            holders = runs[index][1] & mask
            end = end_block
            while index + 1 < len(runs) and runs[index + 1][0] < end_block:
                index += 1
                start, others = runs[index]
                if not holders & others:
                    end = start
                    break
                holders &= others
            spans.append((at, end, holders))
            at = end
        return spans


NO_MATCH = PrefixMatch([], 0)


def bits(mask: int) -> Iterator[int]:
    """Yields the single bits of a mask, lowest first."""
    while mask:
        low = mask & -mask
        yield low
        mask ^= low
