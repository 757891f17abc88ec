"""The hits of several policies on one trace at one capacity, as a share of what there is to gain.

The gap is what Belady's optimum hits more than LRU. Half of it is knowledge of the future, which no policy has."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from typing import NamedTuple

from bench.eviction_traces import WHOLE, Trace, part_of, requests_of
from pinyon_lab.caches.replay import BELADY, replay

__all__ = ["BELADY", "LRU", "OWN", "THIN_GAP_POINTS", "Capacity", "Cell", "Outcome", "measure", "measure_all"]

LRU = "lru"
OWN = "reuse_hazard"
THIN_GAP_POINTS = 1.0
"""The gap below which a share of it says little: a few hits are many percent of it."""


class Capacity(NamedTuple):
    """A number of ``blocks``, or ``percent`` of the distinct blocks that are asked for."""

    blocks: int = 0
    percent: float = 0.0

    def of(self, unlike: int) -> int:
        return self.blocks or max(1, round(self.percent / 100 * unlike))

    def __str__(self) -> str:
        return f"{self.blocks:,} blocks" if self.blocks else f"{self.percent:g} %"


@dataclass(frozen=True)
class Cell:
    """A replay: its trace, its capacity, and the part of the trace."""

    trace: Trace
    capacity: Capacity
    part: str = WHOLE

    def __str__(self) -> str:
        return f"{self.trace.name}, {self.part}, {self.capacity}"


@dataclass(frozen=True)
class Outcome:
    """The results by policy; CPU seconds include the replay's own."""

    capacity: int
    blocks: int
    """The number of blocks asked for."""
    hits: Mapping[str, int]
    evicted: Mapping[str, int]
    cpu_s: Mapping[str, float]

    def percent(self, policy: str) -> float:
        """Returns the percentage of the blocks asked for that hit."""
        return self._percent(self.hits[policy])

    @property
    def gap_points(self) -> float:
        """The points by which Belady hits more than LRU."""
        return self.points(BELADY)

    def points(self, policy: str) -> float:
        """Returns the points by which the policy hits more than LRU."""
        return self._percent(self.hits[policy] - self.hits[LRU])

    def _percent(self, hits: int) -> float:
        return 100 * hits / self.blocks if self.blocks else 0.0

    def closed_percent(self, policy: str) -> float | None:
        """Returns the percentage of the gap that the policy closes; None if there is no gap."""
        gap = self.hits[BELADY] - self.hits[LRU]
        return 100 * (self.hits[policy] - self.hits[LRU]) / gap if gap > 0 else None

    @property
    def thin(self) -> bool:
        return self.gap_points < THIN_GAP_POINTS

    def us_per_evicted(self, policy: str) -> float:
        return 1e6 * self.cpu_s[policy] / self.evicted[policy] if self.evicted[policy] else 0.0


def measure(cell: Cell, policies: Sequence[str]) -> Outcome:
    """Replays a cell by each policy. Raises :class:`pinyon.core.errors.PinyonError` for an unreadable trace."""
    requests = part_of(requests_of(cell.trace), cell.part)
    capacity = cell.capacity.of(len({block for asked in requests for block in asked.blocks}))
    hits, evicted, cpu_s = {}, {}, {}
    for policy in policies:
        began_s = time.process_time()
        done = replay(requests, policy, capacity)
        cpu_s[policy] = time.process_time() - began_s
        hits[policy], evicted[policy] = done.hit_blocks, done.evicted
    return Outcome(capacity, sum(len(asked.blocks) for asked in requests), hits, evicted, cpu_s)


def measure_all(
    cells: Iterable[Cell],
    policies: Sequence[str],
    processes: int,
    limit_s: float,
    done: Callable[[Cell, Outcome], None],
) -> None:
    """Measures cells, and passes each outcome to ``done`` as it comes; those not done within ``limit_s`` are left out.
    Neighbours should be of one trace: then it is read once per process. Raises as :func:`measure`."""
    # Spawned, not forked: a copy of this process would have its threads' locks.
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(measure, cell, policies): cell for cell in cells}
        try:
            for future in as_completed(futures, timeout=limit_s):
                done(futures[future], future.result())
        except TimeoutError:
            pass
        finally:
            pool.shutdown(cancel_futures=True)
