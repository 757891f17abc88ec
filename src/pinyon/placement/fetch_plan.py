"""The choice of a source for each missing block."""

from __future__ import annotations

from bisect import bisect_left

from pinyon.core.request import Role
from pinyon.placement.fetch_time import fetch_s
from pinyon.placement.instances import InstanceState
from pinyon.placement.policy import Fetch, Pool
from pinyon.placement.prefix_match import PrefixMatch

STORE_LEAD_BLOCKS = 256
"""The blocks being read at store nodes, beyond those at a worker, from which on workers are read from as well."""


class FetchPlanner:
    """The choice of sources for one placement. What most readers have in common, as they hold nothing of the prompt, is
    worked out once: a hot prefix has hundreds of holders."""

    def __init__(self, pool: Pool, match: PrefixMatch) -> None:
        self._pool = pool
        self._match = match
        self._block_bytes = pool.prefills[0].block_bytes
        self._common: dict[tuple[int, int, int], list[_Span]] = {}
        """Spans of readers that hold none of the blocks, by ``(first block, end block, mask of who may be asked)``."""

    def plan(self, reader: InstanceState, first_block: int, end_block: int) -> tuple[Fetch, ...]:
        """Returns what ``reader`` fetches of ``[first_block, end_block)``, in order. Each span comes from another one
        of the pool's sources, which holds all of it. Requires ``end_block <= match.extent(first_block,
        pool.asked_by(reader) & ~reader.bit)``.

        From each position the source that goes furthest is taken, which gives the fewest spans. Among equals a store
        node is preferred (it runs no requests) unless it is read much more than a worker. Then comes one on the
        reader's own host (nothing goes over the network), then the one with the fewest blocks being read, and the next
        one after the reader. So readers of a hot prefix spread over its replicas on store nodes, and over its peers."""
        spans = self._spans(reader, first_block, end_block)
        return tuple(Fetch(span.source_for(reader), span.first, span.end - span.first) for span in spans)

    def fetch_s(self, reader: InstanceState, first_block: int, end_block: int) -> float:
        """Returns the predicted seconds of the fetches of :meth:`plan`."""
        spans = self._spans(reader, first_block, end_block)
        return fetch_s(reader, [(each.source_for(reader), each.blocks * self._block_bytes) for each in spans])

    def _spans(self, reader: InstanceState, first_block: int, end_block: int) -> list[_Span]:
        asked = self._pool.asked_by(reader)
        key = first_block, end_block, asked
        common = self._common.get(key)
        if common is None:
            common = self._common[key] = self._found(first_block, end_block, asked)
        for span in common:
            if span.mask & reader.bit:
                return self._found(first_block, end_block, asked & ~reader.bit)
        return common

    def _found(self, first_block: int, end_block: int, asked: int) -> list[_Span]:
        spans = self._match.spans(first_block, end_block, asked, len(self._match.runs))
        return [_Span(first, end, mask, self._pool.sources.among(mask)) for first, end, mask in spans]


class _Span:
    """A span of blocks, and the sources that hold all of it, also as a mask."""

    __slots__ = ("_by_host", "_rows", "blocks", "end", "first", "least", "mask")

    def __init__(self, first: int, end: int, mask: int, holders: list[InstanceState]) -> None:
        self.first, self.end, self.blocks, self.mask = first, end, end - first, mask
        self.least, self._rows = holders, list[int]()
        self._by_host: dict[str, list[InstanceState]] = {}
        if len(holders) == 1:  # nothing is to be chosen
            return
        best = _preferred(holders)
        for each in best:
            self._by_host.setdefault(each.host, []).append(each)
        self.least, self._rows = _least_read(best)

    def source_for(self, reader: InstanceState) -> InstanceState:
        """Returns the source for a reader that is none of the holders."""
        near = self._by_host.get(reader.host) if reader.host else None
        least, rows = (self.least, self._rows) if near is None else _least_read(near)
        return least[bisect_left(rows, reader.row) % len(least)]


def _preferred(holders: list[InstanceState]) -> list[InstanceState]:
    """Returns the store nodes among the holders, or all holders if there are none or these are read much more."""
    stores = [each for each in holders if each.info.role is Role.STORE]
    if not stores or len(stores) == len(holders):
        return holders
    least = min(each.inflight_reads for each in stores)
    spared = any(each.inflight_reads + STORE_LEAD_BLOCKS < least for each in holders)
    return holders if spared else stores


def _least_read(holders: list[InstanceState]) -> tuple[list[InstanceState], list[int]]:
    """Returns the holders with the fewest blocks being read, and their rows, which are in order."""
    fewest = min(each.inflight_reads for each in holders)
    least = sorted((each for each in holders if each.inflight_reads == fewest), key=lambda each: each.row)
    return least, [each.row for each in least]
