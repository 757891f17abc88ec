"""The invariants of rounds, for any arrivals and ends and any stopping policy."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from pinyon.batching import StepSeen
from pinyon.batching.chunked_hash_tree import ChunkedHashTree
from pinyon.batching.interface import Rounds
from pinyon.batching.rounds import BATCHES_MAX, PrefixRounds
from pinyon_lab.policies.feather import LabFeatherSettings, LabLearning, TipTree
from pinyon_lab.policies.group_rounds import GroupRounds
from tests.long import usually


def path(random: Random) -> list[int]:
    """Returns the blocks of a path in one of a few trees; an id determines all blocks before it."""
    tree, depth = random.randrange(3), random.randint(0, 6)
    ids, place = [], tree
    for _ in range(depth):
        place = place * 2 + random.randrange(2) + 4
        ids.append(place)
    return ids


@settings(max_examples=usually(20, long=100), deadline=None)
@given(random=st.randoms(use_true_random=True), stop=st.sampled_from([*LabLearning, None]), seed=st.integers(0, 9))
def test_everybody_has_a_token_in_each_round(random: Random, stop: LabLearning | None, seed: int) -> None:
    """The policy None stands for groups that the caller has named."""
    rounds: Rounds = GroupRounds(1)
    if stop is not None:
        tree: ChunkedHashTree[int] | None = TipTree(1) if seed % 2 else None
        rounds = PrefixRounds(LabFeatherSettings(stop=stop, seed=seed).stopping(), 1, tree)
    waited: dict[int, int] = {}
    new = 0
    for _ in range(150):
        for _ in range(random.choice([0, 0, 0, 1, 5])):
            rounds.add(new, path(random))
            waited[new] = 0
            new += 1
        for number in list(waited):
            if random.random() < 0.05:
                rounds.remove(number)
                del waited[number]
        batch = rounds.next()
        assert len(set(batch)) == len(batch)
        assert set(batch) <= waited.keys()
        assert bool(batch) == bool(waited)
        if random.random() < 0.1:
            rounds.observe(StepSeen(0, random.randint(1, 100), 0.1))
            continue
        if batch:
            rounds.done()
            rounds.observe(StepSeen(len(batch), random.choice([0, 0, 10]), random.uniform(0.01, 1)))
        for number in waited:
            waited[number] += 1
        for number in batch:
            waited[number] = 0
        # The rest of this round, and the whole next one.
        assert all(steps < 2 * BATCHES_MAX for steps in waited.values())


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1 << 30), stop=st.sampled_from(LabLearning))
def test_the_same_calls_have_the_same_answers(seed: int, stop: LabLearning) -> None:
    def run() -> list[list[int]]:
        random = Random(seed)
        rounds = PrefixRounds(LabFeatherSettings(stop=stop, seed=3).stopping(), 1)
        taken = []
        for number in range(60):
            rounds.add(number, path(random))
            if number > 20:
                rounds.remove(number - 20)
            batch = rounds.next()
            rounds.done()
            rounds.observe(StepSeen(len(batch), 0, random.uniform(0.01, 1)))
            taken.append(batch)
        return taken

    assert run() == run()
