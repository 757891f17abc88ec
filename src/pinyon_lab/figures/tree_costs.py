"""The cost of operations of the chunked hash tree (FEATHER Table 5.1): CPU time of each call.

As in the paper, requests have equal length, and all come before the first is admitted. The batch is filled, and
whenever a request ends, the next one enters. For each request that enters, the best request is asked for about five
times, as by a policy that refuses some. The first call after a change searches; later calls return the known result."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from pinyon.batching.chunked_hash_tree import ChunkedHashTree, chunk_hashes
from pinyon_lab.figures.figure import Clock

PRINTED_US = {"insert": 153.714, "add": 11.143, "finish": 38.952, "find": 6.641}
"""The mean times of Table 5.1, in C++: 5,000 requests of 5,000 tokens."""
OPERATIONS = ("insert", "add", "finish", "find", "find_first", "find_known")
ASKED = 5
"""The calls of ``find`` for each request that enters: 26,405 for 5,000 requests in the table."""
VOCABULARY = 50_000
CLOCK_READS = 1_001


@dataclass(frozen=True)
class TreeLoad:
    """The load of one run.

    ``own`` is the number of a request's last tokens, which no other request shares; its other tokens are its group's.
    With ``hashed``, the hashes are known when a request comes, as the hashes of block keys are."""

    requests: int
    tokens: int
    own: int
    chunk: int
    groups: int = 5
    batch: int = 500
    hashed: bool = False


class _Timed:
    """The CPU time of each operation in ns, including that of reading the clock."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.taken_ns: dict[str, list[int]] = {operation: [] for operation in OPERATIONS}
        self._changed = True

    def do(self, operation: str, call: Callable[..., None], *arguments: Any) -> None:
        began = self._clock()
        call(*arguments)
        self.taken_ns[operation].append(self._clock() - began)
        self._changed = True

    def find(self, tree: ChunkedHashTree[int]) -> int:
        began = self._clock()
        best = tree.find_best()
        took = self._clock() - began
        self.taken_ns["find"].append(took)
        self.taken_ns["find_first" if self._changed else "find_known"].append(took)
        self._changed = False
        return -1 if best is None else best.request


def _run(load: TreeLoad, seed: int, clock: Clock) -> dict[str, list[int]]:
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, VOCABULARY, (load.groups, load.tokens - load.own), dtype=np.uint32)
    timed, tree = _Timed(clock), ChunkedHashTree[int](load.chunk)
    for number in range(load.requests):
        own = rng.integers(0, VOCABULARY, load.own, dtype=np.uint32)
        tokens = np.concatenate([shared[rng.integers(load.groups)], own])
        if load.hashed:
            timed.do("insert", tree.insert_hashes, number, chunk_hashes(tokens, tree.chunk))
        else:
            timed.do("insert", tree.insert, number, tokens)
    active: list[int] = []
    while tree.waiting or active:
        while tree.waiting and len(active) < load.batch:
            best = timed.find(tree)
            timed.do("add", tree.add_to_batch, best)
            active.append(best)
            for _ in range(ASKED - 1):
                timed.find(tree)
        timed.do("finish", tree.finish, active.pop(int(rng.integers(len(active)))))
    return timed.taken_ns


class OperationCost(NamedTuple):
    """The cost of one operation in µs, medians of the rounds."""

    calls: int
    mean_us: float
    p50_us: float
    p99_us: float


def tree_costs(load: TreeLoad, seed: int, rounds: int, clock: Clock) -> dict[str, OperationCost]:
    """Returns the cost of each operation, without the time of reading the clock."""
    every = [_run(load, seed + each, clock) for each in range(rounds)]
    own_ns = _clock_ns(clock)
    costs = {}
    for operation in OPERATIONS:
        runs = [taken[operation] for taken in every]
        costs[operation] = OperationCost(
            len(runs[0]),
            _us([statistics.fmean(taken) for taken in runs], own_ns),
            _us([statistics.median(taken) for taken in runs], own_ns),
            _us([float(np.percentile(taken, 99, method="nearest")) for taken in runs], own_ns),
        )
    return costs


def _clock_ns(clock: Clock) -> float:
    """Returns the time that reading the clock adds to a measured time: that system call exceeds some operations."""
    taken = []
    for _ in range(CLOCK_READS):
        began = clock()
        taken.append(clock() - began)
    return statistics.median(taken)


def _us(values_ns: list[float], own_ns: float) -> float:
    return round(max(0.0, statistics.median(values_ns) - own_ns) / 1e3, 2)
