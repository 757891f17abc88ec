"""FEATHER's other measure of who is next (appendix A.9)."""

from __future__ import annotations

from typing import TypeVar

from pinyon.batching.chunked_hash_tree import ARRIVALS, BestRequest, ChunkedHashTree

R = TypeVar("R")


class TipTree(ChunkedHashTree[R]):
    """Next is, of those that wait, the one by which the shared prefix loses least, of equals the shortest, of those the
    first to come."""

    def _find(self) -> BestRequest[R]:
        node = self._tip
        while not node.waiting and node.parent is not None:
            node = node.parent
        return self.look(self._by_arrival[node.best & ARRIVALS])
