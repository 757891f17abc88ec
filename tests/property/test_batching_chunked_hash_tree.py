"""The chunked hash tree against sets of prefixes: every answer after operations of every kind, at four chunk sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pinyon.batching import ChunkedHashTree
from pinyon.batching.chunked_hash_tree import chunk_hashes
from pinyon_lab.policies.feather import TipTree
from tests.long import usually

EXAMPLES = usually(25, long=125)
OPERATIONS = 200
"""Operations per chunk size: 32,000 in all (100,000 in long runs), each followed by a check of every query."""

Tokens = tuple[int, ...]


class Plain:
    """The rules of §4.2 without a structure: requests are lists of prefixes, and each answer counts all anew."""

    def __init__(self, chunk: int) -> None:
        self.chunk = chunk
        self.waiting: dict[int, tuple[int, list[Tokens]]] = {}
        self.active: dict[int, list[Tokens]] = {}
        self.came = 0

    def insert(self, request: int, tokens: Tokens) -> None:
        self.remove(request)
        ends = [*range(self.chunk, len(tokens), self.chunk), len(tokens)] if tokens else []
        self.waiting[request] = (self.came, [tokens[:end] for end in ends])
        self.came += 1

    def add_to_batch(self, request: int) -> None:
        self.active[request] = self.waiting.pop(request)[1]

    def remove(self, request: int) -> None:
        self.waiting.pop(request, None)
        self.active.pop(request, None)

    def shared(self, more: list[list[Tokens]]) -> int:
        levels = [*self.active.values(), *more]
        depth = 0
        while levels and all(len(each) > depth and each[depth] == levels[0][depth] for each in levels):
            depth += 1
        return depth

    def saved(self, passed: Counter[tuple[Tokens, int]], above: Tokens = (), depth: int = 0) -> int:
        """Returns the largest number of levels that disjoint groups need not read once more."""
        own = (passed[above, depth] - 1) * depth if depth else 0
        whole = len(above) == depth * self.chunk  # nothing follows a short last chunk
        below = [each for each, level in passed if whole and level == depth + 1 and each[: len(above)] == above]
        return max(own, sum(self.saved(passed, each, depth + 1) for each in below))

    def find_by_tip(self) -> int | None:
        def cost(number: int) -> tuple[int, int, int]:
            came, levels = self.waiting[number]
            return -self.shared([levels]) if self.active else 0, len(levels), came

        return min(self.waiting, key=cost) if self.waiting else None

    def find_best(self) -> tuple[int, int, int, int] | None:
        if not self.waiting:
            return None
        covered = {prefix for prefixes in self.active.values() for prefix in prefixes}
        missing = {number: len(set(levels) - covered) for number, (_, levels) in self.waiting.items()}
        best = min(self.waiting, key=lambda number: (missing[number], self.waiting[number][0]))
        levels = self.waiting[best][1]
        after = self.shared([levels])
        peers = [
            each for _, each in self.waiting.values() if after == 0 or each[after - 1 : after] == [levels[after - 1]]
        ]
        return best, self.shared([]), after, len(peers)


def tokens_like(plain: Plain, random: Random, letters: int) -> Tokens:
    """Returns tokens that often begin like another request's, for branches, equal requests and ends inside others."""
    known = [levels[-1] for _, levels in plain.waiting.values() if levels]
    known += [levels[-1] for levels in plain.active.values() if levels]
    stem = random.choice(known) if known and random.random() < 0.7 else ()
    stem = stem[: random.randint(0, len(stem))]
    more = tuple(random.randrange(letters) for _ in range(random.randint(0, 4 * plain.chunk)))
    return (stem + more)[: 8 * plain.chunk]


def step(trees: Sequence[ChunkedHashTree[int]], plain: Plain, random: Random, letters: int, busy: float) -> None:
    """Performs one operation on all. ``busy``: how often an active request is removed rather than one added."""
    waiting, active = list(plain.waiting), list(plain.active)
    kind = random.random()
    if kind < 0.4 or not (waiting or active):
        # Ids come back, both of requests that have gone and of those that are here.
        request = random.randrange(40) if random.random() < 0.3 else 40 + plain.came
        tokens = tokens_like(plain, random, letters)
        for tree in trees:
            tree.insert(request, tokens)
        plain.insert(request, tokens)
    elif kind < 0.9 - 0.4 * busy and waiting:
        best = plain.find_best()
        assert best is not None
        request = best[0] if random.random() < 0.7 else random.choice(waiting)
        for tree in trees:
            tree.add_to_batch(request)
        plain.add_to_batch(request)
    elif kind < 0.9 and active:
        request = random.choice(active)
        for tree in trees:
            tree.finish(request)
        plain.remove(request)
    else:
        request = random.choice(waiting + active)
        for tree in trees:
            tree.remove(request)
        plain.remove(request)


def check_groups(tree: ChunkedHashTree[int], plain: Plain) -> None:
    """Checks that the groups are those that save most, by their hashes."""
    groups = tree.groups(1000)
    passed = Counter((prefix, depth) for levels in plain.active.values() for depth, prefix in enumerate(levels, 1))
    tips = {chunk_hashes(prefix, plain.chunk)[-1]: (prefix, depth) for prefix, depth in passed}
    assert [passed[tips[group.tip]] for group in groups] == [group.requests for group in groups]
    assert [tips[group.tip][1] for group in groups] == [group.depth for group in groups]
    saved = [(group.requests - 1) * group.depth for group in groups]
    assert sum(saved) == plain.saved(passed)
    assert [(group.requests - 1) * group.depth for group in tree.groups(1)] == sorted(saved)[-1:]


@pytest.mark.parametrize("chunk", [1, 2, 16, 50])
@settings(max_examples=EXAMPLES, deadline=None)
@given(random=st.randoms(use_true_random=True), letters=st.integers(1, 3), busy=st.floats(0.1, 1))
def test_every_answer_is_that_of_plain_sets(chunk: int, random: Random, letters: int, busy: float) -> None:
    tree: ChunkedHashTree[int] = ChunkedHashTree(chunk)
    by_tip: TipTree[int] = TipTree(chunk)
    plain = Plain(chunk)
    for _ in range(OPERATIONS):
        step((tree, by_tip), plain, random, letters, busy)
        # Not after each operation: a cached answer must not survive a change after which nothing was asked.
        if random.random() < 0.7:
            assert tree.find_best() == plain.find_best()
            assert tree.find_best() == plain.find_best()
            best = by_tip.find_best()
            assert (None if best is None else best.request) == plain.find_by_tip()
        assert (tree.waiting, tree.active) == (len(plain.waiting), len(plain.active))
        assert tree.tip_depth == plain.shared([])
        if random.random() < 0.05:
            check_groups(tree, plain)


@settings(max_examples=50, deadline=None)
@given(random=st.randoms(use_true_random=True))
def test_who_is_not_there_is_refused(random: Random) -> None:
    tree: ChunkedHashTree[int] = ChunkedHashTree(2)
    here: dict[int, bool] = {}
    for _ in range(100):
        request = random.randrange(8)
        operation = random.choice(["insert", "add_to_batch", "finish", "remove"])
        allowed = {"insert": True, "add_to_batch": here.get(request) is False, "finish": here.get(request) is True}
        if operation == "insert":
            tree.insert(request, [random.randrange(2) for _ in range(random.randint(0, 6))])
            here[request] = False
        elif allowed.get(operation, request in here):
            getattr(tree, operation)(request)
            here = {each: active for each, active in here.items() if each != request}
            if operation == "add_to_batch":
                here[request] = True
        else:
            with pytest.raises(KeyError):
                getattr(tree, operation)(request)
        assert len(tree) == len(here)
        assert all(request in tree for request in here)
