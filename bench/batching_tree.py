"""What operations of the chunked hash tree cost (FEATHER Table 5.1): CPU time of each call.

As there: requests of equal length come, all before the first is admitted; the batch is filled, and whenever one ends,
the next one enters. The best request is asked for about five times for each that enters, as a policy does that refuses
some: the first time after a change it is looked for, then it is known.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.report import percentile
from pinyon.batching.chunked_hash_tree import ChunkedHashTree, chunk_hashes

__all__ = ["ASKED", "OPERATIONS", "PRINTED_US", "TreeLoad", "tree_costs"]

PRINTED_US = {"insert": 153.714, "add": 11.143, "finish": 38.952, "find": 6.641}
"""Mean times of Table 5.1, in C++: 5,000 requests of 5,000 tokens."""
OPERATIONS = ("insert", "add", "finish", "find", "find_first", "find_known")
ASKED = 5
"""Times that the best request is asked for, for each that enters: 26,405 for 5,000 in the table."""
VOCABULARY = 50_000
CLOCK_READS = 1_001


@dataclass(frozen=True)
class TreeLoad:
    """``own``: the last tokens of a request, which nobody shares; the others are those of its group. ``hashed``: the
    hashes are known when it comes, as those of block keys are."""

    requests: int
    tokens: int
    own: int
    chunk: int
    groups: int = 5
    batch: int = 500
    hashed: bool = False


class _Asked:
    """A tree, and the CPU time of each operation, in ns, that of reading the clock with it."""

    def __init__(self, load: TreeLoad) -> None:
        self._tree: ChunkedHashTree[int] = ChunkedHashTree(load.chunk)
        self._hashed = load.hashed
        self.taken_ns: dict[str, list[int]] = {operation: [] for operation in OPERATIONS}
        self._changed = True

    @property
    def waiting(self) -> int:
        return self._tree.waiting

    def insert(self, number: int, tokens: npt.NDArray[np.uint32]) -> None:
        hashes = chunk_hashes(tokens, self._tree.chunk) if self._hashed else []
        began = time.thread_time_ns()
        if self._hashed:
            self._tree.insert_hashes(number, hashes)
        else:
            self._tree.insert(number, tokens)
        self._took("insert", began)

    def find(self) -> int:
        began = time.thread_time_ns()
        best = self._tree.find_best()
        took = time.thread_time_ns() - began
        self.taken_ns["find"].append(took)
        self.taken_ns["find_first" if self._changed else "find_known"].append(took)
        self._changed = False
        return -1 if best is None else best.request

    def add(self, number: int) -> None:
        began = time.thread_time_ns()
        self._tree.add_to_batch(number)
        self._took("add", began)

    def finish(self, number: int) -> None:
        began = time.thread_time_ns()
        self._tree.finish(number)
        self._took("finish", began)

    def _took(self, operation: str, began: int) -> None:
        self.taken_ns[operation].append(time.thread_time_ns() - began)
        self._changed = True


def _run(load: TreeLoad, seed: int) -> dict[str, list[int]]:
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, VOCABULARY, (load.groups, load.tokens - load.own), dtype=np.uint32)
    asked = _Asked(load)
    for number in range(load.requests):
        own = rng.integers(0, VOCABULARY, load.own, dtype=np.uint32)
        asked.insert(number, np.concatenate([shared[rng.integers(load.groups)], own]))
    active: list[int] = []
    while asked.waiting or active:
        while asked.waiting and len(active) < load.batch:
            best = asked.find()
            asked.add(best)
            active.append(best)
            for _ in range(ASKED - 1):
                asked.find()
        asked.finish(active.pop(int(rng.integers(len(active)))))
    return asked.taken_ns


def tree_costs(load: TreeLoad, seed: int, rounds: int) -> dict[str, dict[str, Any]]:
    """Of each operation the number of calls, and in µs mean, median and 99th percentile: medians of the rounds."""
    every = [_run(load, seed + each) for each in range(rounds)]
    own_ns = _clock_ns()
    costs = {}
    for operation in OPERATIONS:
        runs = [taken[operation] for taken in every]
        costs[operation] = {
            "calls": len(runs[0]),
            "mean_us": _us([statistics.fmean(taken) for taken in runs], own_ns),
            "p50_us": _us([statistics.median(taken) for taken in runs], own_ns),
            "p99_us": _us([percentile(taken, 99) for taken in runs], own_ns),
        }
    return costs


def _clock_ns() -> float:
    """What reading the clock twice takes of the time in between: a system call, and more than some operations."""
    taken = []
    for _ in range(CLOCK_READS):
        began = time.thread_time_ns()
        taken.append(time.thread_time_ns() - began)
    return statistics.median(taken)


def _us(values_ns: list[float], own_ns: float) -> float:
    return round(max(0.0, statistics.median(values_ns) - own_ns) / 1e3, 2)
