"""The chunked hash tree by hand: the paper's examples, and each place where its pseudocode would break (appendix A)."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from pinyon.batching import BestRequest, ChunkedHashTree
from pinyon.batching.chunked_hash_tree import LEVELS_MAX, chunk_hashes


def tree(**requests: str) -> ChunkedHashTree[str]:
    """Returns a tree of the requests in chunks of one letter."""
    made: ChunkedHashTree[str] = ChunkedHashTree(1)
    for request, letters in requests.items():
        made.insert(request, [ord(letter) for letter in letters])
    return made


def test_an_empty_batch_takes_the_shortest_and_its_depth() -> None:
    cht = tree(a="xyz", b="pq", c="pqr")
    assert cht.find_best() == BestRequest("b", 0, 2, 2)  # c equals b at level 2


def test_figure_4_2() -> None:
    cht: ChunkedHashTree[str] = ChunkedHashTree(2)
    for request, letters in {"r1": "ABCDEF", "r2": "ABCDGH", "r3": "ABIJKL", "r4": "MNOPQR"}.items():
        cht.insert(request, [ord(letter) for letter in letters])
    cht.add_to_batch("r1")
    assert cht.tip_depth == 3
    assert cht.find_best() == BestRequest("r2", 3, 2, 1)
    cht.add_to_batch("r2")
    assert cht.tip_depth == 2
    assert cht.find_best() == BestRequest("r3", 2, 1, 1)
    cht.finish("r1")
    assert cht.tip_depth == 3  # r2 alone has its own end


def test_figure_a_2_a_sharer_comes_before_a_stranger() -> None:
    cht = tree(r1="sa", r2="sb", r4="sc", r3="sb")
    cht.add_to_batch("r1")
    cht.add_to_batch("r2")
    assert cht.find_best() == BestRequest("r3", 1, 1, 2)  # r4 would leave the same depth, but r3 came first
    cht.add_to_batch("r3")
    cht.finish("r1")
    assert cht.tip_depth == 2


def test_the_first_of_the_batch_is_counted_like_the_others() -> None:
    # Algorithm 5 returns before it has counted the first request (line 3).
    cht = tree(a="xy", b="xy", c="p")
    cht.add_to_batch("a")
    assert cht.find_best() == BestRequest("b", 2, 2, 1)
    cht.finish("a")
    assert cht.find_best() == BestRequest("c", 0, 1, 1)


def test_covered_levels_are_missed_no_more() -> None:
    # Algorithm 5 adds to the count (line 10) where it should subtract.
    cht = tree(a="xyz", b="xyzw", c="p")
    cht.add_to_batch("a")
    assert cht.find_best() == BestRequest("b", 3, 3, 1)  # b misses one level, like c, which came later


def test_who_is_added_does_not_find_itself_shared() -> None:
    # Algorithm 5 looks into the working set after its own hashes are there (line 15).
    cht = tree(a="xyz", b="xqq")
    cht.add_to_batch("a")
    cht.add_to_batch("b")
    assert cht.tip_depth == 1


@pytest.mark.parametrize("others", [0, 1, 3])
def test_a_finished_request_leaves_nothing_and_its_id_is_free(others: int) -> None:
    # Algorithm 6 returns before REMOVE if at most one is left (lines 13 and 17).
    cht = tree(a="xyz")
    cht.add_to_batch("a")
    for number in range(others):
        cht.insert(f"o{number}", [ord(letter) for letter in "xy"])
        cht.add_to_batch(f"o{number}")
    cht.finish("a")
    assert "a" not in cht
    assert cht.waiting == 0
    cht.insert("a", [ord("p")])
    assert cht.find_best() == BestRequest("a", 2 if others else 0, 0 if others else 1, 1)


def test_an_answer_does_not_outlive_who_comes_and_goes() -> None:
    # Algorithm 3 leaves FINDBEST's last answer as it was.
    cht = tree(a="xyz")
    assert cht.find_best() == BestRequest("a", 0, 3, 1)
    cht.insert("b", [ord("x")])
    assert cht.find_best() == BestRequest("b", 0, 1, 2)
    cht.remove("b")
    assert cht.find_best() == BestRequest("a", 0, 3, 1)
    cht.remove("a")
    assert cht.find_best() is None


def test_at_depth_0_all_that_wait_are_peers() -> None:
    cht = tree(a="x", b="p", c="q")
    cht.add_to_batch("a")
    assert cht.find_best() == BestRequest("b", 1, 0, 2)


def test_a_short_last_chunk_is_a_level_of_its_own() -> None:
    cht: ChunkedHashTree[str] = ChunkedHashTree(2)
    cht.insert("whole", [1, 2, 3, 4])
    cht.insert("short", [1, 2, 3])
    cht.insert("equal", [1, 2, 3])
    assert [cht.levels(request) for request in ("whole", "short", "equal")] == [2, 2, 2]
    cht.add_to_batch("short")
    assert cht.find_best() == BestRequest("equal", 2, 2, 1)
    cht.add_to_batch("equal")
    assert cht.find_best() == BestRequest("whole", 2, 1, 1)


def test_a_short_stranger_comes_before_a_long_one_that_shares() -> None:
    # A.9's proof needs requests of one length.
    cht = tree(a="xy", long="xyabc", stranger="p")
    cht.add_to_batch("a")
    assert cht.find_best() == BestRequest("stranger", 2, 0, 2)


def test_ids_that_are_here_count_as_new() -> None:
    cht = tree(a="x", b="y")
    cht.insert("a", [ord("z")])
    assert cht.find_best() == BestRequest("b", 0, 1, 1)
    cht.add_to_batch("b")
    cht.insert("b", [ord("y")])
    assert (cht.waiting, cht.active) == (2, 0)


def test_unknown_ids_are_refused() -> None:
    cht = tree(a="x", b="y")
    cht.add_to_batch("a")
    for call, request in ((cht.add_to_batch, "a"), (cht.finish, "b"), (cht.remove, "c"), (cht.levels, "c")):
        with pytest.raises(KeyError, match=request):
            call(request)
    cht.remove("a")
    assert cht.active == 0


def test_known_hashes_do_as_well_as_tokens() -> None:
    cht: ChunkedHashTree[str] = ChunkedHashTree(4)
    cht.insert_hashes("a", [b"one", b"two"])
    cht.insert_hashes("b", [b"one", b"other"])
    cht.add_to_batch("a")
    assert cht.find_best() == BestRequest("b", 2, 1, 1)
    cht.add_to_batch("b")
    assert cht.tip_depth == 1


def test_hashes_are_of_all_tokens_before() -> None:
    tokens = np.arange(10, dtype=np.uint32)
    hashes = chunk_hashes(tokens, 4)
    assert len(hashes) == 3
    assert chunk_hashes(tokens[:8], 4) == hashes[:2]
    assert chunk_hashes(list(range(10)), 4) == chunk_hashes(tokens.astype(np.int64), 4) == hashes
    assert chunk_hashes(np.arange(1, 11, dtype=np.uint32), 4)[1] != hashes[1]
    other = tokens.copy()
    other[0] = 7
    assert not set(chunk_hashes(other, 4)) & set(hashes)
    assert chunk_hashes([], 4) == []


@pytest.mark.parametrize("tokens", [[-1], [1 << 32], [0.5], [1, 2, -3]])
def test_tokens_are_32_bit_numbers(tokens: list[int]) -> None:
    with pytest.raises(ValueError, match="32"):
        chunk_hashes(tokens, 2)


def test_limits() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        ChunkedHashTree(0)
    cht: ChunkedHashTree[str] = ChunkedHashTree(1)
    with pytest.raises(ValueError, match="levels"):
        cht.insert_hashes("a", range(LEVELS_MAX + 1))
    assert "a" not in cht


def test_memory_does_not_grow_with_those_that_have_gone() -> None:
    """The best leaf is not asked for in half of the rounds, so that asking clears nothing there."""
    cht: ChunkedHashTree[int] = ChunkedHashTree(4)
    random = np.random.default_rng(7)
    stems = random.integers(0, 1 << 32, (5, 64), np.uint32)

    def rounds(first: int, count: int) -> int:
        for number in range(first, first + count):
            own = random.integers(0, 1 << 32, 1 + number % 40, np.uint32)
            cht.insert(number, np.concatenate([stems[number % 5][: 8 + number % 57], own]))
            if number >= 20:
                cht.add_to_batch(number - 20) if number % 3 else cht.remove(number - 20)
            if number >= 60 and (number - 40) % 3:
                cht.finish(number - 60) if (number - 60) in cht else None
            if (number // 100) % 2:
                cht.find_best()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = rounds(0, 1_000)
        # A request that left anything would leave at least 1 KB: 64 levels and more.
        assert rounds(1_000, 4_000) - before < 200_000
    finally:
        tracemalloc.stop()
    for request in range(5_000):
        if request in cht:
            cht.remove(request)
    assert (len(cht), cht.tip_depth) == (0, 0)
