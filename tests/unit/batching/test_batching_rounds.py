"""Rounds by hand: the requests that a step decodes, and what the stopping policy hears of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import pytest

from pinyon.batching import StepSeen
from pinyon.batching.rounds import BATCHES_MAX, DecodeTime, Formed, PrefixRounds
from pinyon.batching.stopping import Always, BatchState, Taken


class Told:
    """A stopping policy that answers as told, and keeps what it hears."""

    learns = False
    exploring = 0.0
    shifts = 0

    def __init__(self, adds: Callable[[BatchState], bool]) -> None:
        self._adds = adds
        self.asked: list[BatchState] = []
        self.learned: list[tuple[list[Taken], float]] = []

    def seen(self, state: BatchState) -> tuple[int, ...]:
        return state

    def adds(self, state: BatchState) -> bool:
        self.asked.append(state)
        return self._adds(state)

    def learn(self, episode: Sequence[Taken], tokens_s: float) -> None:
        self.learned.append((list(episode), tokens_s))

    def table(self) -> dict[str, list[float]]:
        return {}

    def restore(self, table: Mapping[str, Sequence[float]]) -> None:
        pass


def homogeneous(state: BatchState) -> bool:
    """Returns whether a batch may stay: requests' own ends may be lost, a shared prefix of two levels may not."""
    return state.loss < 2


def path(letters: str) -> list[int]:
    """Returns the path of a prompt: each letter is a block that is known by all blocks before it."""
    return [int.from_bytes(letters[: end + 1].encode()) for end in range(len(letters))]


def rounds(stopping: Told | Always, *prompts: str) -> PrefixRounds:
    """Returns rounds with requests 0, 1, ... of these prompts."""
    made = PrefixRounds(stopping, 1)
    for number, letters in enumerate(prompts):
        made.add(number, path(letters))
    return made


def steps(made: PrefixRounds, count: int, seconds: float = 1.0) -> list[list[int]]:
    taken = []
    for _ in range(count):
        batch = made.next()
        made.done()
        made.observe(StepSeen(len(batch), 0, seconds))
        taken.append(sorted(batch))
    return taken


def test_each_prefix_has_its_step_and_the_largest_comes_first() -> None:
    made = rounds(Told(homogeneous), "aax", "bby", "bbz", "aaq", "bbw")
    assert steps(made, 4) == [[1, 2, 4], [0, 3], [1, 2, 4], [0, 3]]
    assert made.formed == Formed(2, 2, 2, 2 / 3, 2.5, 0.0, 0)


def test_one_decision_brings_all_who_share_as_much() -> None:
    told = Told(homogeneous)
    made = rounds(told, "aax", "aay", "aaz", "bb")
    assert steps(made, 1) == [[0, 1, 2]]
    assert told.asked == [BatchState(1, 1, 1), BatchState(3, 2, 0)]


def test_where_nobody_shares_one_decision_is_enough() -> None:
    told = Told(lambda state: True)
    made = rounds(told, *(chr(97 + number) for number in range(20)))
    assert steps(made, 1) == [list(range(20))]
    assert told.asked == [BatchState(1, 1, 18)]


def test_a_partial_sharer_goes_to_another_batch_of_its_branch() -> None:
    made = rounds(Told(homogeneous), "abcdx", "abcdy", "aqqx", "aqqy")
    assert steps(made, 2) == [[2, 3], [0, 1]]  # the shortest request of the branch begins


def test_what_a_round_has_brought_is_its_tokens_by_its_time() -> None:
    told = Told(homogeneous)
    made = rounds(told, "aax", "aay", "bb")
    steps(made, 2, 0.25)
    assert told.learned == []  # a round is over when the next one begins
    made.next()
    assert told.learned == [([Taken(BatchState(1, 1, 0), 1), Taken(BatchState(2, 2, 0), 0)], 6.0)]
    assert made.reward == 6.0


def test_a_round_stands_until_an_arrival_or_a_change_of_policy() -> None:
    stops = True
    told = Told(lambda state: state.loss < 2 or not stops)
    made = rounds(told, "aax", "aay", "bb")
    steps(made, 4)
    asked = len(told.asked)
    made.remove(1)
    assert steps(made, 2) == [[0], [2]]
    assert len(told.asked) == asked + 2  # the second answer was the same
    made.add(3, path("bb"))
    assert steps(made, 2) == [[2, 3], [0]]
    stops = False
    assert steps(made, 1) == [[0, 2, 3]]


def test_newcomers_wait_for_the_next_round() -> None:
    made = rounds(Told(homogeneous), "aa", "bb")
    assert steps(made, 1) == [[0]]
    made.add(2, path("cc"))
    assert steps(made, 4) == [[1], [0], [1], [2]]


def test_a_step_that_decodes_nobody_takes_nobodys_turn() -> None:
    made = rounds(Told(homogeneous), "aa", "bb")
    assert made.next() == [0]
    made.observe(StepSeen(0, 100, 1.0))
    assert made.next() == [0]


def test_the_last_batch_of_a_round_takes_all_who_are_left() -> None:
    count = BATCHES_MAX + 5
    made = rounds(Told(lambda state: False), *(chr(97 + number) for number in range(count)))
    taken = steps(made, BATCHES_MAX)
    assert [len(batch) for batch in taken] == [1] * (BATCHES_MAX - 1) + [6]
    assert sorted(number for batch in taken for number in batch) == list(range(count))


def test_nobody_is_running() -> None:
    made = rounds(Always(), "a")
    assert made.next() == [0]
    made.remove(0)
    made.remove(0)
    assert made.next() == []
    made.add(1, [])
    assert made.next() == [1]


def test_the_time_of_prompts_is_taken_out() -> None:
    decode = DecodeTime()
    assert decode.of(StepSeen(4, 100, 1.0)) == 0.0  # the time of prompts is unknown
    assert decode.of(StepSeen(4, 0, 0.5)) == 0.5
    assert decode.of(StepSeen(0, 100, 0.2)) == 0.0
    assert decode.of(StepSeen(4, 100, 0.5)) == pytest.approx(0.3)
    assert decode.of(StepSeen(4, 1000, 0.5)) == 0.0  # less than its prompts take: nothing is known
    assert decode.of(StepSeen(4, 1000, 0.5, decode_s=0.125)) == 0.125  # but the engine may report it


def test_a_round_with_a_step_of_unknown_time_teaches_nothing() -> None:
    told = Told(homogeneous)
    made = rounds(told, "aa", "bb")
    for prefill_tokens in (50, 0):
        batch = made.next()
        made.done()
        made.observe(StepSeen(len(batch), prefill_tokens, 1.0))
    made.next()
    assert told.learned == []
    steps(made, 2)
    made.next()
    assert [tokens_s for _, tokens_s in told.learned] == [1.0]


class Coarse(Told):
    """A stopping policy that knows the batch's size only to the power of two."""

    def seen(self, state: BatchState) -> tuple[int, ...]:
        return (state.batch.bit_length(),)


def test_a_round_asks_the_policy_once_about_all_equal_states() -> None:
    answers = iter([False, True, True])
    policy = Coarse(lambda state: next(answers))
    made = rounds(policy, "aab", "aac", "bbd", "bbe", "bbf", "ccg", "cch")
    round_of = []
    for _ in range(3):
        round_of.append(sorted(made.next()))
        made.done()
    # With one request, the prefix's peers would come; with two or three, others. Each gets one answer.
    assert len({state.batch.bit_length() for state in policy.asked}) == len(policy.asked)
    assert len({state.batch for state in policy.asked}) <= 2
    assert round_of[0] == [2]  # the round is the first of the largest branch, left alone


def test_a_stranger_that_leaves_lets_the_others_share_again() -> None:
    made = rounds(Always(), "aaab", "aaac", "z")
    assert sorted(made.next()) == [0, 1, 2]
    assert made.formed.shared_blocks == 0
    made.done()
    made.remove(2)
    assert sorted(made.next()) == [0, 1]
    assert made.formed.shared_blocks == 3
    assert made.formed.homogeneity == 0.75


def test_a_policy_that_tries_something_is_asked_once_in_a_round() -> None:
    """A second answer would be forgotten before it had any effect."""
    answers = itertools.cycle([False, True])
    made = rounds(Coarse(lambda state: next(answers)), "aab", "aac")
    for _ in range(2):
        assert len(made.next()) == 1
        made.done()
    assert sorted(made.next()) == [0, 1]
