from __future__ import annotations

import json
from collections import Counter

import pytest

from bench.index import PROMPT_BLOCKS
from bench.placement import EVENTS_MIN, HEADLINE, POLICIES, measure
from bench.placement import _aims as aims
from bench.placement import _comparison as comparison
from bench.placement_cluster import SHARED_BLOCKS, Cluster, Shape
from bench.placement_dynamo import event_json, event_msgpack, signed
from pinyon.core.block_keys import unpack_keys
from pinyon.core.key_sample import sampled_keys

BLOCKS = 20 * PROMPT_BLOCKS


@pytest.fixture(params=[(4, 64, False), (4, 1, True)], ids=["mixed", "separate"])
def cluster(request: pytest.FixtureRequest) -> Cluster:
    instances, stride, separate = request.param
    return Cluster(Shape(instances, BLOCKS, stride, separate), seed=3)


def test_half_of_each_prompt_is_held_and_none_comes_twice(cluster: Cluster) -> None:
    held = {key for prompt in cluster.filled.prompts for key in unpack_keys(prompt)}
    seen: Counter[bytes] = Counter()
    for _ in range(50):
        keys = unpack_keys(cluster.request().block_keys)
        assert len(keys) == PROMPT_BLOCKS
        assert held.issuperset(keys[:SHARED_BLOCKS])
        seen.update(keys[SHARED_BLOCKS:])
    assert held.isdisjoint(seen)
    assert max(seen.values()) == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_lives_end_and_the_books_agree(cluster: Cluster, policy: str) -> None:
    cluster.warm(policy)
    inflight = cluster.fleet.inflight
    before = inflight.decodes
    turn = cluster.turn(policy, 120)
    assert len(turn.decisions_us) == 120
    assert 0 < inflight.decodes < before + 120  # some ended meanwhile
    assert inflight.expired == 0
    assert turn.reports > 0
    assert turn.event_blocks > 0
    inflight.check_integrity()
    cluster.fleet.index.check_integrity()


def test_thinned_chains_have_gaps_where_blocks_are_gone(cluster: Cluster) -> None:
    assert cluster.match_us(20)[1] == SHARED_BLOCKS
    cluster.thin(0.05)
    for prompt, numbers in zip(cluster.filled.prompts, cluster.filled.held_by, strict=True):
        keys = unpack_keys(prompt)
        known = sampled_keys(keys, cluster.every)
        alone = [bool(cluster.fleet.index.match(key).blocks) for key in known]
        match = cluster.fleet.index.match(prompt, every=cluster.every)
        first_gap = alone.index(False) if False in alone else len(alone)
        assert match.blocks == first_gap * cluster.every
        assert len(numbers) == len(set(numbers))
    assert cluster.match_us(20)[1] < SHARED_BLOCKS
    cluster.fleet.index.check_integrity()


def test_scattered_blocks_are_gone_afterwards(cluster: Cluster) -> None:
    before = cluster.fleet.index.entries
    assert cluster.scattered_per_s(3) > 0
    assert cluster.fleet.index.entries <= before  # some were evicted for the new ones
    cluster.fleet.index.check_integrity()


def test_figures_and_aims() -> None:
    figures = measure(Shape(32, BLOCKS, 64), decisions=3, seed=1, beside=False)
    assert figures["blocks"] == BLOCKS
    assert figures["indexed_keys"] == BLOCKS // 4
    assert json.loads(json.dumps(figures)) == figures
    found = {aim.name: aim for aim in aims(32, 64, False, figures)}
    assert len(found) == 4
    median = figures[HEADLINE]["decision_us"]["p50"]["median"]
    assert found[f"32 mixed instances, one key in 4: decision by {HEADLINE}, p50, µs"].measured == median
    assert sum(aim.target == EVENTS_MIN for aim in found.values()) == 3
    (missing,) = comparison(32, figures, "no such package")
    assert missing.measured is None
    assert not missing.met
    assert missing.reason == "no such package"
    (beside,) = comparison(32, figures, {"hashes_us": {"p50": {"median": median}}})
    assert beside.met


def test_dynamo_is_told_of_blocks_as_it_reads_them() -> None:
    told = json.loads(event_json(7, [5, 9]))
    assert [block["tokens_hash"] for block in told["data"]["stored"]["blocks"]] == [5, 9]
    assert told["event_id"] == 7
    packed = event_msgpack(b"\x01\x02", [1 << 63])
    assert b"\xabBlockStored\xdd\x00\x00\x00\x01\xcf\x80\x00\x00\x00\x00\x00\x00\x00\xc0" in packed
    assert packed.endswith(b"\xdd\x00\x00\x00\x02\x01\x02\x10\xc0\xc0")
    assert [signed(value) for value in (0, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)] == [0, (1 << 63) - 1, -(1 << 63), -1]
