"""The tables of an agent: long prompts, and events that mean something else than is thought."""

from __future__ import annotations

from services.agent.engine_blocks import COUNTED, SLICE_BLOCKS, EngineBlocks
from tests.unit.agent.engine_model import BLOCK_TOKENS, START, EngineModel, Prompt


def test_a_long_prompt_is_taken_in_slices() -> None:
    prompt = Prompt(tuple(range((2 * SLICE_BLOCKS + 5) * BLOCK_TOKENS)))
    blocks = EngineBlocks(START, BLOCK_TOKENS, 10_000, dict.fromkeys(COUNTED, 0))
    lengths = [len(blocks) for _ in blocks.take(0, [1.5, EngineModel().store(prompt)])]
    assert lengths == [SLICE_BLOCKS, 2 * SLICE_BLOCKS, 2 * SLICE_BLOCKS + 5]
    assert blocks.keys() == prompt.keys()


def test_more_copies_than_there_can_be_are_not_believed() -> None:
    counts = dict.fromkeys(COUNTED, 0)
    blocks = EngineBlocks(START, BLOCK_TOKENS, 10, counts)
    stored = EngineModel().store(Prompt(tuple(range(4 * BLOCK_TOKENS))))
    for number in range(2):
        list(blocks.take(number, [1.5, stored]))
    assert (len(blocks), counts["drops"]) == (4, 0)
    list(blocks.take(2, [1.5, stored]))
    assert (len(blocks), counts["drops"]) == (0, 1)


def test_blocks_of_another_size_get_no_key() -> None:
    counts = dict.fromkeys(COUNTED, 0)
    blocks = EngineBlocks(START, 2 * BLOCK_TOKENS, 10, counts)
    list(blocks.take(0, [1.5, EngineModel().store(Prompt(tuple(range(4 * BLOCK_TOKENS))))]))
    assert (len(blocks), counts["skipped_blocks"]) == (0, 4)
