"""Runs: the blocks of a prompt that stay together on one store node. Pure.

With one node per block, each prompt would ask many nodes; with one node per prompt (by its first key), all prompts that
begin alike would share a node. So a prompt's new blocks go in *runs* of some thousand tokens, and a run's node is
chosen by its *anchor*: the first of its blocks that the store lacked. A prefix that many prompts share is in the store
before most of them come. So each prompt's anchor is a key of its own, wherever the prompts diverge.
docs/design/store.md has the costs and gains on a trace."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from pinyon.core.block_keys import BlockKey
from pinyon.store.records import NodeRecord

RUN_TOKENS = 4096
"""The tokens of a run. A prompt of 128k tokens is 32 runs, and one more for each turn in which it grew."""


@dataclass(slots=True, eq=False)
class Run:
    """The blocks that go to one node. The first put that finds one of them missing in the store sets the ``anchor``."""

    anchor: BlockKey | None = None


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
    missing: Iterable[tuple[BlockKey, Run]], weights: Mapping[str, float], count: int
) -> dict[Run, list[str]]:
    """Returns the ``count`` best nodes, in order of preference, for each run of which the store lacks a block.

    The missing blocks come in prompt order; ``weights`` are the nodes' capacities."""
    chosen: dict[Run, list[str]] = {}
    for key, run in missing:
        if run not in chosen:
            run.anchor = run.anchor or key
            chosen[run] = rank(run.anchor, weights)[:count]
    return chosen


def leading_runs(holders: Sequence[Set[NodeRecord]], runs_max: int) -> list[tuple[NodeRecord, int]]:
    """Returns the first blocks that are held without a gap, as runs of a holder and its number of blocks.

    There are as few runs as possible, at most ``runs_max``. If several nodes hold a run, the first by id is named."""
    runs: list[tuple[NodeRecord, int]] = []
    at = 0
    while at < len(holders) and len(runs) < runs_max:
        left, begin = holders[at], at
        while at < len(holders) and (common := left & holders[at]):
            left = common
            at += 1
        if at == begin:
            break
        runs.append((min(left, key=lambda node: node.node_id), at - begin))
    return runs
