"""The statistics that papers print of a workload, counted independently with NumPy.

They cover all uses of all blocks, with an unlimited cache."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from pinyon_lab.traces import TraceRow

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.integer]


class Measured:
    """One entry per request, per reuse of a block (``reuse_*``) or per block (``lifespans_s``). Ids fit in 32 bits."""

    def __init__(self, rows: Iterable[TraceRow]) -> None:
        ids, kept, parents = array("i"), [], set()
        for row in rows:
            ids.extend(row.blocks)
            kept.append(row._replace(blocks=(len(row.blocks),)))
            parents.add(row.parent)
        self.times_s = np.array([row.time_s for row in kept])
        self.inputs = np.array([row.input_tokens for row in kept])
        self.outputs = np.array([row.output_tokens for row in kept])
        self.kinds = np.array([row.kind for row in kept])
        self.turns = np.array([row.turn for row in kept])
        self.multi: Bools = self.turns > 1
        self.users = np.array([int(row.user) for row in kept])
        self.followed: Bools = np.array([row.chat in parents for row in kept])
        self.blocks = np.array([row.blocks[0] for row in kept])

        use_ids = np.frombuffer(ids, np.int32)
        use_rows = np.repeat(np.arange(len(kept), dtype=np.int32), self.blocks)
        first_uses = (np.cumsum(self.blocks) - self.blocks).astype(np.int32)
        by_id = np.argsort(use_ids, kind="stable").astype(np.int32)
        again = use_ids[by_id[1:]] == use_ids[by_id[:-1]]
        reuses, before = by_id[1:][again], by_id[:-1][again]
        self.reuse_rows = use_rows[reuses]
        self.reuse_offsets = reuses - first_uses[self.reuse_rows]
        self.reuse_gaps_s: Floats = self.times_s[self.reuse_rows] - self.times_s[use_rows[before]]
        """The seconds since the last use of the block."""
        self.reuse_owners = self.users[use_rows[before]]
        """The user of that last use."""
        self.hits = np.bincount(self.reuse_rows, minlength=len(kept))
        last = np.flatnonzero(np.append(~again, True))
        first = np.append(0, last[:-1] + 1)
        self.lifespans_s: Floats = self.times_s[use_rows[by_id[last]]] - self.times_s[use_rows[by_id[first]]]
        self.reuses_of_block = last - first
        hot = np.repeat(last - first >= 0.1 * len(kept), last - first + 1)
        self.hot = np.bincount(use_rows[by_id[hot]], minlength=len(kept))
        """Blocks that a tenth of all requests have."""

    def share_of_hits(self, which: Bools) -> float:
        return float(self.hits[which].sum() / self.hits.sum())

    def hit_ratio(self, which: Bools | slice = slice(None)) -> float:
        """Returns the hit ratio of these requests, by blocks."""
        return float(self.hits[which].sum() / self.blocks[which].sum())

    def gaps_s(self, which: Bools) -> Floats:
        """Returns the reuse times of the blocks that hit in these requests."""
        return self.reuse_gaps_s[which[self.reuse_rows]]

    def of_busiest(self, share: float, of_each: Ints | None = None) -> float:
        """Returns the busiest users' part of requests, or of ``of_each``; ``share``: their share of active users."""
        sums = np.sort(np.bincount(self.users, of_each))[::-1]
        active = int((np.bincount(self.users) > 0).sum())
        return float(sums[: round(share * active)].sum() / sums.sum())

    def of_most_hits(self, share: float) -> float:
        return self.of_busiest(share, self.hits)

    def of_hottest_blocks(self, share: float) -> float:
        """Returns the part of all reuses that the hottest blocks have; ``share`` is their share of the blocks."""
        reuses = np.sort(self.reuses_of_block)[::-1]
        return float(reuses[: round(share * len(reuses))].sum() / reuses.sum())

    def user_turns(self) -> Floats:
        """Returns the mean turn of each user's requests, the highest first."""
        requests = np.bincount(self.users)
        return np.sort(np.bincount(self.users, self.turns)[requests > 0] / requests[requests > 0])[::-1]
