"""Runs: the blocks of a prompt that stay together on one store node. Pure.

With one node per block, each prompt would ask many nodes; with one node per prompt (by its first key), all prompts that
begin alike would share a node. So a prompt's new blocks go in *runs* of some thousand tokens, and a run's node is
chosen by its *anchor*: the first of its blocks that the store lacked. A prefix that many prompts share is in the store
before most of them come. So each prompt's anchor is a key of its own, wherever the prompts diverge.
docs/design/store.md has the costs and gains on a trace."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from xxhash import xxh3_64_intdigest

from pinyon.core.block_keys import BlockKey
from pinyon.store.records import NodeRecord

RUN_TOKENS = 4096
"""The tokens of a run. A prompt of 128k tokens is 32 runs, and one more for each turn in which it grew."""


@dataclass(slots=True, eq=False)
class Run:
    """The blocks that go to one node. The first put that finds one of them missing in the store sets the ``anchor``."""

    anchor: BlockKey | None = None
    node: str = ""
    """The node that was chosen last."""


class Runs:
    """The runs of one prompt's new blocks, in the order in which they are offered."""

    def __init__(self, block_tokens: int, run_tokens: int = RUN_TOKENS) -> None:
        self._blocks = max(1, run_tokens // block_tokens)
        self._left = 0
        self._run = Run()

    def next(self) -> Run:
        """Returns the run of the next new block."""
        if not self._left:
            self._run, self._left = Run(), self._blocks
        self._left -= 1
        return self._run


def rank(key: bytes, weights: Mapping[str, float]) -> list[str]:
    """Returns the nodes from best to worst for this key, by weighted rendezvous (highest random weight) hashing.

    Every caller ranks the nodes alike without talking to others. A node's share of the keys is its share of the
    ``weights``, which are positive; their order does not matter. When a node comes, goes or grows, only the objects
    move that it gains or loses (Thaler and Ravishankar, 1998; with weights: Schindelhauer and Schomaker, 2005)."""

    def score(node: str) -> tuple[float, str]:
        # 52 bits and a half make a double between 0 and 1, so that the logarithm is never 0.
        draw = ((xxh3_64_intdigest(key + node.encode("utf-8")) >> 12) + 0.5) / (1 << 52)
        return -weights[node] / math.log(draw), node

    return sorted(weights, key=score, reverse=True)


def choose_nodes(
    missing: Iterable[tuple[BlockKey, Run]], nodes: Mapping[str, NodeRecord], count: int, object_bytes: int
) -> dict[Run, list[str]]:
    """Returns the ``count`` best ``nodes``, in order of preference, for each run of which the store lacks a block.

    The missing blocks come in prompt order. The first two by rank are candidates. If the first one is full, the second
    one is taken if it has room, or if what it would evict next is worth less. So a pool evicts nearly as one cache
    would ("the power of two choices"). A run stays where it began."""
    weights = weights_of(nodes.values())
    runs: dict[Run, int] = {}
    for key, run in missing:
        run.anchor = run.anchor or key
        runs[run] = runs.get(run, 0) + object_bytes
    chosen: dict[Run, list[str]] = {}
    for run, size in runs.items():
        assert run.anchor is not None
        best = rank(run.anchor, weights)
        if run.node in nodes:
            best.insert(0, best.pop(best.index(run.node)))
        elif len(best) > 1 and _colder(nodes[best[1]], nodes[best[0]], size):
            best[:2] = best[1], best[0]
        run.node = best[0] if best else ""
        chosen[run] = best[:count]
    return chosen


def weights_of(nodes: Iterable[NodeRecord]) -> dict[str, float]:
    """Returns the nodes' weights for :func:`rank`: their capacities in bytes."""
    return {node.node_id: float(max(1, node.capacity_bytes)) for node in nodes}


def _colder(one: NodeRecord, other: NodeRecord, size_bytes: int) -> bool:
    """Returns whether so many bytes push out less of ``one`` than of the ``other``."""
    full, other_full = (each.room.free_bytes is not None and each.room.free_bytes < size_bytes for each in (one, other))
    if not full or not other_full:
        return other_full
    if one.room.worth is None or other.room.worth is None:
        return False
    return one.room.worth < other.room.worth


SHARED_BLOCKS = 8
"""A run is not split for fewer blocks than these: each run costs a round trip."""


def leading_runs(
    holders: Sequence[Set[NodeRecord]], runs_max: int, cost: Callable[[NodeRecord], Any]
) -> list[tuple[NodeRecord, int]]:
    """Returns the first blocks that are held without a gap, as runs of a holder and its number of blocks, at most
    ``runs_max``.

    Of the nodes that go at least half as far as the one that goes furthest, and ``SHARED_BLOCKS`` far, the one that
    ``cost`` least is named. So copies of the beginning of a prompt are read, too."""
    runs: list[tuple[NodeRecord, int]] = []
    at = 0
    while at < len(holders) and holders[at] and len(runs) < runs_max:
        ends: dict[NodeRecord, int] = {}
        left, end = holders[at], at
        while left:
            end += 1
            further = left & holders[end] if end < len(holders) else frozenset[NodeRecord]()
            if len(further) < len(left):
                ends |= dict.fromkeys(left - further, end)
            left = further
        half = max((end - at + 1) // 2, min(SHARED_BLOCKS, end - at))
        node = min((each for each in ends if ends[each] - at >= half), key=cost)
        runs.append((node, ends[node] - at))
        at = ends[node]
    return runs
