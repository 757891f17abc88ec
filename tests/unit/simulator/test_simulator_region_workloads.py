"""The requests that clients of several regions send: programs, and the prefixes that they share."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinyon.core.errors import InvalidArgument
from pinyon_lab.papers.skywalker.sharing import similarities, similarity
from pinyon_lab.simulator.regions.chats import ARENA, TEMPLATE_TOKENS, WILDCHAT, RegionChatSource, SharedTexts
from pinyon_lab.simulator.regions.programs import Program, ProgramStep, Text, block_keys, fresh_keys, routing_keys
from pinyon_lab.simulator.regions.workloads import WORKLOADS, TreeSettings, TreeSource, sources

BLOCK = 16


@given(st.lists(st.integers(0, 60), max_size=20))
def test_a_text_has_keys_of_its_full_blocks(lengths: list[int]) -> None:
    text, fresh = Text(), fresh_keys(Random(1))
    for length in lengths:
        longer = text.extended(length, fresh)
        assert longer.keys[: len(text.keys)] == text.keys
        text = longer
    assert text.tokens == sum(lengths)
    assert len(text.keys) == len(set(text.keys)) == text.tokens // BLOCK
    assert tuple(block_keys(routing_keys(text.keys))) == text.keys


@pytest.mark.parametrize("workload", WORKLOADS)
def test_programs_are_such_as_can_be_sent(workload: str) -> None:
    made = sources(workload, ("us", "eu"), Random(1))
    for region, source in made.items():
        rng = Random(2)
        for _ in range(30):
            program = source.program(rng)
            assert program.user.startswith(region)
            for place, step in enumerate(program.steps):
                assert -1 <= step.after < place
                assert step.tokens > 0
                assert step.output_tokens > 0
                assert len(step.keys) == step.tokens // BLOCK
                assert len(step.answer) == (step.tokens + step.output_tokens) // BLOCK - len(step.keys)
                if step.after >= 0:
                    before = program.steps[step.after]
                    known = (*before.keys, *before.answer)
                    assert step.keys[: len(known)] == known, "it goes on with all that was said"


def test_an_unknown_workload_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="arena"):
        sources("chess", ("us",), Random(1))


@pytest.mark.parametrize(("branches", "requests"), [(2, 15), (4, 85)])
def test_trees_have_as_many_requests_as_in_the_paper(branches: int, requests: int) -> None:
    settings = TreeSettings(branches)
    source = TreeSource(Text().extended(settings.system_tokens, fresh_keys(Random(1))), settings, "us")
    one, other = source.program(Random(2)), source.program(Random(3))
    assert len(one.steps) == requests
    assert one.user != other.user
    assert one.steps[0].keys[:6] == other.steps[0].keys[:6], "they have their instructions in common"
    siblings = [step for step in one.steps if step.after == 0]
    assert len(siblings) == branches
    assert len({step.keys for step in siblings}) == 1
    assert len({step.answer for step in siblings}) == branches


def test_conversations_are_as_long_as_published() -> None:
    for settings, turns, long, prompt, answer in ((ARENA, 1.2, 0.0, 52.3, 189.5), (WILDCHAT, 2.5, 0.037, 295.6, 441.3)):
        source = RegionChatSource(SharedTexts(settings, Random(1)), "us", Random(2))
        programs = [source.program(rng) for rng in map(Random, range(3_000))]
        counts = [len(each.steps) for each in programs]
        assert sum(counts) / len(counts) == pytest.approx(turns, rel=0.1)
        assert sum(count > 10 for count in counts) / len(counts) == pytest.approx(long, abs=0.01)
        first = [each.steps[0].tokens - TEMPLATE_TOKENS for each in programs]
        assert sum(first) / len(first) == pytest.approx(prompt, rel=0.15)
        answers = [step.output_tokens for each in programs for step in each.steps]
        assert sum(answers) / len(answers) == pytest.approx(answer, rel=0.1)


def test_together_are_conversations_of_one_user() -> None:
    source = RegionChatSource(SharedTexts(WILDCHAT, Random(1)), "us", Random(2), 3, 3)
    program = source.program(Random(4))
    assert sum(step.after < 0 for step in program.steps) == 3


def test_openings_of_one_kind_only() -> None:
    with pytest.raises(ValueError, match="one kind"):
        RegionChatSource(SharedTexts(replace(WILDCHAT, own=0.9), Random(1)), "us", Random(1))


def step_of(keys: tuple[bytes, ...], tokens: int) -> ProgramStep:
    return ProgramStep(-1, tokens, 1, keys, ())


def test_similarity_is_of_the_shorter_prompt() -> None:
    fresh = fresh_keys(Random(1))
    common = fresh(4)
    one, other = step_of(common, 64), step_of((*common, *fresh(4)), 128)
    assert similarity(one, other, BLOCK, 0) == 1.0, "one begins the other"
    third = step_of((*common[:2], *fresh(6)), 128)
    assert similarity(other, third, BLOCK, 0) == 32 / 128
    assert similarity(other, third, BLOCK, 16) == 16 / 112
    assert similarity(one, step_of(fresh(4), 64), BLOCK, 0) == 0.0


def test_similarities_are_by_user_and_by_region() -> None:
    fresh = fresh_keys(Random(1))
    mine, everybodys = fresh(8), fresh(2)

    def program(user: str, keys: tuple[bytes, ...]) -> Program:
        return Program(user, (step_of(keys, 16 * len(keys)),))

    found = similarities(
        {
            "us": [program("a", mine), program("a", mine), program("b", (*everybodys, *fresh(6)))],
            "eu": [program("c", (*everybodys, *fresh(6)))],
        },
        BLOCK,
        0,
        Random(1),
    )
    assert found.within_user == 1.0
    assert 0 < found.across_users < 0.25
    assert found.across_regions > found.across_users
