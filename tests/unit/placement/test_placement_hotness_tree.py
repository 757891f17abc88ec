"""The length of the prefix that names a request, against counting everything anew each time."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinyon.placement.hotness_tree import DEPTH_MAX, HotnessSettings, HotnessTree


def packed(*numbers: int) -> bytes:
    """Returns chained keys: each names all before it."""
    return b"".join(repr(numbers[: end + 1]).encode().ljust(64)[:16] for end in range(len(numbers)))


def depth(tree: HotnessTree, prompt: bytes, now_s: float = 0.0, instances: int = 8) -> int:
    key = tree.key_of(prompt, now_s, instances)
    return next(end for end in range(1, len(prompt) // 16 + 1) if prompt[(end - 1) * 16 : end * 16] == key)


PUBLISHED = HotnessSettings()
TEXT = HotnessSettings(hot=0.0, cold=0.0, window_requests=0, window_s=30.0)


def test_what_all_share_is_told_apart_by_what_follows():
    tree, rng = HotnessTree(PUBLISHED), Random(1)
    depths = [depth(tree, packed(0, rng.randrange(1000), rng.randrange(1000))) for _ in range(400)]
    assert depths[:19] == [1] * 19, "too few to say"
    assert set(depths[25:]) == {2}, "a system prompt, and what a user said"


def test_a_popular_prefix_is_told_apart_as_far_as_it_is_shared():
    tree, rng = HotnessTree(PUBLISHED), Random(2)
    popular = (0, 1, 2, 3, 4)
    seen = []
    for _ in range(600):
        tail = rng.randrange(10_000)
        hot = rng.random() < 0.5
        seen.append((hot, depth(tree, packed(*popular, tail) if hot else packed(0, 10_000 + tail, 5))))
    assert {each for hot, each in seen[200:] if hot} == {6}
    assert {each for hot, each in seen[200:] if not hot} == {2}


def test_what_is_cold_again_is_named_by_less():
    tree, rng = HotnessTree(PUBLISHED), Random(3)
    for _ in range(100):
        depth(tree, packed(7, rng.randrange(1000)))
    assert depth(tree, packed(7, 8)) == 2
    for number in range(198):
        depth(tree, packed(1000 + number, 0))
    assert depth(tree, packed(7, 9)) == 1
    for number in range(200):
        assert depth(tree, packed(7 if number % 25 == 0 else 2000 + number, 1)) == 1, "warm is not hot again"


@pytest.mark.parametrize("instances", [4, 8, 32])
def test_the_texts_bounds_depend_on_how_many_there_are(instances):
    """A prefix becomes hot above 2 / n of the window's requests, and stays hot until it has less than 1 / n."""
    for share, expected in ((0.7 / instances, 1), (3 / instances, 2)):
        tree, rng, depths = HotnessTree(TEXT), Random(4), []
        for number in range(3000):
            hot = rng.random() < share
            found = depth(tree, packed(0, number) if hot else packed(1 + number, 0), number * 0.01, instances)
            if hot and number > 1000:
                depths.append(found)
        assert sum(each == expected for each in depths) > 0.9 * len(depths)


def test_above_one_share_is_not_yet_hot_by_the_text():
    tree, rng = HotnessTree(TEXT), Random(5)
    for number in range(6000):
        hot = number > 3000 and rng.random() < 1.4 / 8
        assert depth(tree, packed(0 if hot else 1 + number, number), number * 0.01) == 1


def test_a_window_of_time_forgets():
    tree = HotnessTree(TEXT)
    for number in range(100):
        depth(tree, packed(7, number), now_s=number * 0.1)
    assert depth(tree, packed(7, 1), now_s=10.0) == 2
    assert depth(tree, packed(7, 1), now_s=50.0) == 1
    assert len(tree) == 1, "what left the window is not remembered"


def test_a_prompt_ends():
    tree = HotnessTree(PUBLISHED)
    assert {depth(tree, packed(7)) for _ in range(100)} == {1}


def test_memory_is_that_of_the_window():
    tree = HotnessTree(PUBLISHED)
    for number in range(5000):
        tree.key_of(packed(number % 3, number, 1, 2), 0.0, 8)
    assert len(tree) <= 2 * PUBLISHED.window_requests


def test_a_stride_names_as_blocks_of_its_length_do():
    """Prompts have 0 to 5 whole strides and a rest, in blocks a quarter as long. The rest is one more block."""
    fine, coarse, rng = HotnessTree(PUBLISHED), HotnessTree(PUBLISHED), Random(5)
    for number in range(2_000):
        strides = rng.randint(0, 5)
        numbers = [0] * min(strides, 3) + [rng.randrange(3) for _ in range(max(0, strides - 3))]
        long = [part for each in numbers for part in (each, 1, 2, 3)] + [9_000 + number] * rng.randint(0, 3)
        if not long:
            continue
        prompt = packed(*long)
        ends = [min(end, len(long)) for end in range(4, len(long) + 4, 4)]
        if len(long) < 4:
            ends = [1, len(long)][: len(long)]
        keys = b"".join(prompt[16 * end - 16 : 16 * end] for end in ends)
        assert fine.key_of(prompt, 0.0, 8, 4) == coarse.key_of(keys, 0.0, 8)


@given(prompt=st.integers(1, 80), hot=st.integers(0, 10), stride=st.sampled_from((1, 3, 16)))
def test_a_path_is_every_so_many_blocks_and_the_end(prompt: int, hot: int, stride: int) -> None:
    """The plain version lists all keys that may name a prompt, as far as they are told apart."""
    every = [number.to_bytes(16, "little") for number in range(prompt)]
    names = [key for number, key in enumerate(every, 1) if number % stride == 0 or number == prompt]
    if 1 < prompt < stride:
        names.insert(0, every[0])
    tree = HotnessTree(PUBLISHED)
    tree._extended = dict.fromkeys(names[:hot])
    assert tree._path(b"".join(every), stride) == names[: hot + 1]


@pytest.mark.parametrize("stride", [1, 16])
def test_a_prefix_has_at_most_so_many_strides(stride: int) -> None:
    keys = b"".join(number.to_bytes(16, "little") for number in range(stride * DEPTH_MAX + 50))
    tree = HotnessTree(PUBLISHED)
    for _ in range(4000):
        found = tree.key_of(keys, 0.0, 8, stride)
    assert int.from_bytes(found, "little") == stride * DEPTH_MAX - 1
