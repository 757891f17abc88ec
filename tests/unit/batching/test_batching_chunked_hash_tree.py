"""The chunked hash tree by hand: the paper's examples, and each place where its pseudocode would break (appendix A)."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from pinyon.batching import BestRequest, ChunkedHashTree
from pinyon.batching.chunked_hash_tree import LEVELS_MAX
from pinyon_lab.figures.tree_costs import chunk_hashes


def tree(chunk: int = 1, /, **requests: str) -> ChunkedHashTree[str]:
    """Returns a tree of the requests in chunks of so many letters; a level's hash is all that comes before."""
    made: ChunkedHashTree[str] = ChunkedHashTree()
    for request, letters in requests.items():
        made.insert(request, [letters[: start + chunk] for start in range(0, len(letters), chunk)])
    return made


def test_an_empty_batch_takes_the_shortest_and_its_depth() -> None:
    cht = tree(a="xyz", b="pq", c="pqr")
    assert cht.find_best() == BestRequest("b", 0, 2, 2)  # c equals b at level 2


def test_figure_4_2() -> None:
    cht = tree(2, r1="ABCDEF", r2="ABCDGH", r3="ABIJKL", r4="MNOPQR")
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
        cht.insert(f"o{number}", ["x", "xy"])
        cht.add_to_batch(f"o{number}")
    cht.finish("a")
    assert "a" not in cht
    assert cht.waiting == 0
    cht.insert("a", ["p"])
    assert cht.find_best() == BestRequest("a", 2 if others else 0, 0 if others else 1, 1)


def test_an_answer_does_not_outlive_who_comes_and_goes() -> None:
    # Algorithm 3 leaves FINDBEST's last answer as it was.
    cht = tree(a="xyz")
    assert cht.find_best() == BestRequest("a", 0, 3, 1)
    cht.insert("b", ["x"])
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
    cht = tree(2, whole="1234", short="123", equal="123")
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
    cht.insert("a", ["z"])
    assert cht.find_best() == BestRequest("b", 0, 1, 1)
    cht.add_to_batch("b")
    cht.insert("b", ["y"])
    assert (cht.waiting, cht.active) == (2, 0)


def test_unknown_ids_are_refused() -> None:
    cht = tree(a="x", b="y")
    cht.add_to_batch("a")
    for call, request in ((cht.add_to_batch, "a"), (cht.finish, "b"), (cht.remove, "c"), (cht.levels, "c")):
        with pytest.raises(KeyError, match=request):
            call(request)
    cht.remove("a")
    assert cht.active == 0


def test_hashes_are_of_all_tokens_before() -> None:
    tokens = np.arange(10, dtype=np.uint32)
    hashes = chunk_hashes(tokens, 4)
    assert len(hashes) == 3
    assert chunk_hashes(tokens[:8], 4) == hashes[:2]
    assert chunk_hashes(np.arange(1, 11, dtype=np.uint32), 4)[1] != hashes[1]
    other = tokens.copy()
    other[0] = 7
    assert not set(chunk_hashes(other, 4)) & set(hashes)
    assert chunk_hashes(tokens[:0], 4) == []


def test_limits() -> None:
    cht = tree()
    with pytest.raises(ValueError, match="levels"):
        cht.insert("a", range(LEVELS_MAX + 1))
    assert "a" not in cht


def test_memory_does_not_grow_with_those_that_have_gone() -> None:
    """The best leaf is not asked for in half of the rounds, so that asking clears nothing there."""
    cht: ChunkedHashTree[int] = ChunkedHashTree()
    random = np.random.default_rng(7)
    stems = random.integers(0, 1 << 32, (5, 64), np.uint32)

    def rounds(first: int, count: int) -> int:
        for number in range(first, first + count):
            own = random.integers(0, 1 << 32, 1 + number % 40, np.uint32)
            cht.insert(number, chunk_hashes(np.concatenate([stems[number % 5][: 8 + number % 57], own]), 4))
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
