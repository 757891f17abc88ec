"""Tests of where the store places a trace's blocks: evenly over the nodes, and on few nodes for one prompt.

All prompts of the trace begin with the same block, as those of one service do. The trace is not part of this
repository: the test looks for it in ``$PINYON_TRACES``, else in ``../shared/traces`` beside the repository."""

from __future__ import annotations

import gzip
import json
import math
import os
from itertools import pairwise
from pathlib import Path
from statistics import fmean, pstdev
from typing import NamedTuple

import pytest

from pinyon.store.records import NodeRecord
from pinyon.store.runs import RUN_TOKENS, Runs, choose_nodes

TRACES = Path(os.environ.get("PINYON_TRACES") or Path(__file__).parents[3] / "shared" / "traces")
CONVERSATIONS = TRACES / "mooncake_conversation.jsonl.gz"
BLOCK_TOKENS = 512


@pytest.fixture(scope="module")
def prompts() -> list[list[bytes]]:
    if not CONVERSATIONS.is_file():
        pytest.skip(f"no {CONVERSATIONS}")
    with gzip.open(CONVERSATIONS) as lines:
        return [[block.to_bytes(16, "big") for block in json.loads(line)["hash_ids"]] for line in lines]


class Spread(NamedTuple):
    held: dict[str, int]
    """The number of blocks by node."""
    asked: list[int]
    """The number of nodes that hold the store's blocks of a prompt, for each prompt that has any; sorted."""
    spans: list[int]
    """The number of stretches of blocks on one node, for each of these prompts; sorted."""

    def variation(self, weights: dict[str, float]) -> float:
        """Returns the coefficient of variation of the share of each node's capacity that is in use."""
        shares = [self.held[node] / weight for node, weight in weights.items()]
        return pstdev(shares) / fmean(shares)


def replay(prompts: list[list[bytes]], weights: dict[str, float], run_tokens: int, *, reuse: bool) -> Spread:
    """Replays every prompt in turn on a store that forgets nothing.

    With ``reuse`` a prompt offers only what the store lacks, else it offers all of its blocks as computed."""
    at: dict[bytes, str] = {}
    spread = Spread(dict.fromkeys(weights, 0), [], [])
    records = {each: NodeRecord(each, "0" * 32, "a:1", int(weight)) for each, weight in weights.items()}
    for keys in prompts:
        hits = next((index for index, key in enumerate(keys) if key not in at), len(keys))
        nodes = [at[key] for key in keys[:hits]]
        if nodes:
            spread.asked.append(len(set(nodes)))
            spread.spans.append(1 + sum(one != next_one for one, next_one in pairwise(nodes)))
        runs = Runs(BLOCK_TOKENS, run_tokens)
        offered = [(key, runs.next()) for key in keys[hits if reuse else 0 :]]
        missing = [(key, run) for key, run in offered if key not in at]
        chosen = choose_nodes(missing, records, 1, 1)
        for key, run in missing:
            at[key] = chosen[run][0]
            spread.held[at[key]] += 1
    spread.asked.sort()
    spread.spans.sort()
    return spread


def p99(values: list[int]) -> int:
    return values[math.ceil(0.99 * len(values)) - 1]


@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize(("nodes", "asked_mean", "asked_p99"), [(4, 1.8, 4), (16, 2.5, 12)])
def test_nodes_hold_alike_and_a_prompt_is_on_few_of_them(
    prompts: list[list[bytes]], nodes: int, asked_mean: float, asked_p99: int, *, reuse: bool
) -> None:
    weights = {f"kv-{number}": 1.0 for number in range(nodes)}
    spread = replay(prompts, weights, RUN_TOKENS, reuse=reuse)
    assert spread.variation(weights) <= 0.1  # the requirement is 0.2
    assert fmean(spread.asked) <= asked_mean
    assert p99(spread.asked) <= asked_p99
    assert spread.spans[-1] <= 40


def test_nodes_are_filled_by_their_size(prompts: list[list[bytes]]) -> None:
    weights = {"kv-0": 4e12, "kv-1": 2e12, "kv-2": 1e12, "kv-3": 1e12}
    assert replay(prompts, weights, RUN_TOKENS, reuse=True).variation(weights) <= 0.1
