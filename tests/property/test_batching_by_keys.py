"""A worker's knowledge of prompts by their blocks' keys equals what their tokens tell."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from pinyon.batching import BATCHING_POLICIES, LEVEL_BLOCKS, BatchRequest, ChunkedHashTree, DecodedPrefixes, Formed
from pinyon.core.block_keys import SHARED_PREFIXES_MAX, chain_block_keys, namespace, tokens_to_bytes
from pinyon_lab.policies.feather import TipTree
from tests.long import usually
from tests.unit.batching.books import Books

BLOCK_TOKENS = 2
START = namespace("model", "layout", "")
PROMPTS = st.lists(st.sampled_from([7, 8]), min_size=1, max_size=26)
"""Prompts of two different tokens: many share a prefix, and they branch at any place in a block."""


def asked(number: int, tokens: list[int]) -> BatchRequest:
    keys = tuple(chain_block_keys(START, tokens_to_bytes(tokens), BLOCK_TOKENS))
    return BatchRequest(number, len(tokens), len(keys) + 1, keys, reusable=len(keys))


@settings(max_examples=usually(25, long=300), deadline=None)
@given(chunk_blocks=st.sampled_from([1, 2, 3]), by_tip=st.booleans(), data=st.data())
def test_who_gets_room_next_is_whom_a_tree_of_tokens_finds(
    chunk_blocks: int, by_tip: bool, data: st.DataObject
) -> None:
    options = f"feather:chunk_blocks={chunk_blocks},passed_over_s=3600,by_tip={str(by_tip).lower()}"
    line = BATCHING_POLICIES.make(options).policy(Books())
    tree: ChunkedHashTree[int] = (TipTree if by_tip else ChunkedHashTree)(chunk_blocks * BLOCK_TOKENS)
    waiting: set[int] = set()
    running: set[int] = set()
    for number in range(data.draw(st.integers(1, 40))):
        match data.draw(st.sampled_from(["come", "come", "take", "end", "cancel"])):
            case "come":
                tokens = data.draw(PROMPTS)
                line.enqueue(asked(number, tokens))
                tree.insert(number, tokens[: len(tokens) - len(tokens) % tree.chunk])
                waiting.add(number)
            case "take":
                best = tree.find_best()
                assert line.admit(1, 1 << 20, 0.0) == ([] if best is None else [best.request])
                if best is not None:
                    tree.add_to_batch(best.request)
                    waiting.remove(best.request)
                    running.add(best.request)
            case "end" if running:
                one = data.draw(st.sampled_from(sorted(running)))
                assert line.remove(one)
                tree.finish(one)
                running.remove(one)
            case "cancel" if waiting:
                one = data.draw(st.sampled_from(sorted(waiting)))
                assert line.remove(one)
                tree.remove(one)
                waiting.remove(one)
    assert (line.waiting, line.running) == (len(waiting), len(running))


@settings(max_examples=usually(25, long=300), deadline=None)
@given(st.data())
def test_what_those_share_that_are_decoded(data: st.DataObject) -> None:
    prefixes = DecodedPrefixes()
    paths: dict[int, tuple[bytes, ...]] = {}
    heads = data.draw(st.lists(PROMPTS, min_size=1, max_size=3))
    for number in range(data.draw(st.integers(1, 24))):
        if paths and data.draw(st.booleans()):
            one = data.draw(st.sampled_from(sorted(paths)))
            del paths[one]
            prefixes.remove(one)
            prefixes.remove(one)  # removing it again has no effect
        else:
            keys = asked(number, data.draw(st.sampled_from(heads)) * 2 + data.draw(PROMPTS)).block_keys
            paths[number] = keys[LEVEL_BLOCKS - 1 :: LEVEL_BLOCKS]
            prefixes.add(number, keys)
        if data.draw(st.booleans()):
            continue
        check(prefixes, list(paths.values()))
        assert prefixes.shared() is prefixes.shared()
    check(prefixes, list(paths.values()))


def check(prefixes: DecodedPrefixes, paths: list[tuple[bytes, ...]]) -> None:
    """Compares by brute force with the set of prefixes, none a part of another, that saves most."""
    sharing = {(key, level): 0 for path in paths for level, key in enumerate(path, 1)}
    for path in paths:
        for level, key in enumerate(path, 1):
            sharing[key, level] += 1
    # Of prefixes that the same requests share, only the deepest can be useful.
    deepest = {}
    for key, level in sorted(sharing, key=lambda each: each[1]):
        if sharing[key, level] > 1:
            deepest[frozenset(place for place, path in enumerate(paths) if key in path)] = key, level
    candidates = [(members, key, level) for members, (key, level) in deepest.items()]
    most = 0
    for count in range(1, SHARED_PREFIXES_MAX + 1):
        for chosen in combinations(candidates, count):
            if all(not one[0] & other[0] for one, other in combinations(chosen, 2)):
                most = max(most, sum((len(members) - 1) * level for members, _, level in chosen))
    said = prefixes.shared()
    for each in said:
        assert each.blocks % LEVEL_BLOCKS == 0
        assert sharing[each.key, each.blocks // LEVEL_BLOCKS] == each.requests > 1
    assert sum((each.requests - 1) * each.blocks for each in said) == most * LEVEL_BLOCKS
    assert [each.requests for each in said] == sorted([each.requests for each in said], reverse=True)
    depth = 0
    while paths and depth < min(map(len, paths)) and len({path[depth] for path in paths}) == 1:
        depth += 1
    levels = sum(map(len, paths))
    homogeneity = depth * len(paths) / levels if levels else 0.0
    assert prefixes.formed() == Formed(requests=len(paths), shared_blocks=depth * LEVEL_BLOCKS, homogeneity=homogeneity)
    assert len(prefixes) == len(paths)
