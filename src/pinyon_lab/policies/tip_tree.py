"""FEATHER's other measure of which request is next (appendix A.9)."""

from __future__ import annotations

from typing import TypeVar

from pinyon.batching.chunked_hash_tree import ARRIVALS, BestRequest, ChunkedHashTree

R = TypeVar("R")


class TipTree(ChunkedHashTree[R]):
    """A tree whose next request shortens the shared prefix least; ties go to the shortest, then to the oldest."""

    def _find(self) -> BestRequest[R]:
        node = self._tip
        while not node.waiting and node.parent is not None:
            node = node.parent
        return self.look(self._by_arrival[node.best & ARRIVALS])
