"""The calls and reports of ``./dev bench conductor``, and how ``./dev bench blocks`` uses a pool."""

from __future__ import annotations

from collections import Counter

from bench.__main__ import names
from bench.blocks import PARTS, POOL_BLOCKS, PROMPT_BLOCKS, SHARED_BLOCKS, Books
from bench.conductor_peers import KEPT, STAGES, Instance, Prompts
from pinyon.api.common.v1 import common_pb2
from pinyon.core.block_keys import chain_block_keys, unpack_keys
from tests.worker_integrity import check_admission


def test_the_benchmarks_are_found_and_their_parts_are_not() -> None:
    assert {"conductor", "blocks"} <= set(names())
    assert not {"conductor_peers", "conductor_timed"} & set(names())


def test_endings_are_new_and_keys_tell_their_places() -> None:
    prompts = Prompts(3, seed=1)
    seen: Counter[bytes] = Counter()
    for _ in range(20):
        beginning, ending = prompts.next()
        keys = unpack_keys(prompts.shared[beginning] + ending)
        places = [key[-1] for key in chain_block_keys(bytes(16), bytes(4 * len(keys)), 1)]
        assert [key[-1] for key in keys] == places
        seen.update(unpack_keys(ending))
    assert max(seen.values()) == 1


async def test_a_placement_is_told_in_three_reports_with_true_holdings() -> None:
    prompts = Prompts(4, seed=2)
    instance = Instance(0, "127.0.0.1:1", prompts)
    instance.hold(0)
    held = set(instance.snapshot_keys())
    begun, ended = Counter[str](), Counter[str]()
    for number in range(3 * KEPT):
        placement = common_pb2.Placement(prefill_instance_id=instance.id, decode_instance_id=instance.id)
        prompt = prompts.next()
        instance.compute(f"r{number}", prompt, placement)
        instance.decode(f"r{number}", prompt, placement)
        assert not instance.told.is_set()
        for _ in range(1 + STAGES * (number % 2)):
            stored, removed = map(set, instance.drain_changes())
            assert held.isdisjoint(stored)
            assert held | stored >= removed
            held = (held | stored) - removed
            news = instance.news()
            begun.update((*news.begun_prefill_request_ids, *news.begun_decode_request_ids))
            ended.update((*news.ended_prefill_request_ids, *news.ended_decode_request_ids))
    assert instance.told.is_set()
    assert held == set(instance.snapshot_keys())
    assert set(begun.values()) == set(ended.values()) == {2}, "as who computes, and as who decodes"
    assert not instance.decoding()


def test_a_full_pool_goes_on_and_half_of_each_prompt_is_found() -> None:
    books = Books("lru", seed=3)
    books.serve(POOL_BLOCKS // SHARED_BLOCKS + 5)
    books.reused = 0
    books.serve(5)
    assert books.reused == 5 * SHARED_BLOCKS < 5 * PROMPT_BLOCKS
    assert set(books.us) == set(PARTS)
    assert books.pool.used == 0
    check_admission(books.admission)
