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


def test_names_that_nobody_removes_are_not_kept() -> None:
    counts = dict.fromkeys(COUNTED, 0)
    blocks = EngineBlocks(START, BLOCK_TOKENS, 10, counts)
    for number in range(11):
        content = {"block_hashes": [number], "token_ids": [1] * BLOCK_TOKENS, "block_size": BLOCK_TOKENS}
        other = {"block_hashes": [-1], "token_ids": [1] * BLOCK_TOKENS, "block_size": BLOCK_TOKENS}
        events = [{"type": "BlockStored", **each} for each in (content, other)]
        events += [{"type": "BlockRemoved", "block_hashes": [-1]} for _ in range(2)]
        assert counts["drops"] == 0
        list(blocks.take(number, [1.5, events]))
        assert not len(blocks)
    assert (len(blocks._keys), counts["drops"]) == (0, 1)


def test_a_name_of_another_content_takes_back_the_old_one() -> None:
    blocks = EngineBlocks(START, BLOCK_TOKENS, 10, dict.fromkeys(COUNTED, 0))
    old, new = Prompt((1,) * BLOCK_TOKENS), Prompt((2,) * BLOCK_TOKENS)
    for number, prompt in enumerate((old, old, new)):
        (event,) = EngineModel().store(prompt)
        list(blocks.take(number, [1.5, [event | {"block_hashes": [7]}]]))
    assert blocks.keys() == new.keys()
    assert blocks.changes.drain() == (new.keys(), [])
    list(blocks.take(3, [1.5, [{"type": "BlockRemoved", "block_hashes": [7]}]]))
    assert (blocks.keys(), blocks._keys, blocks._total) == ([], {}, 0)


def test_a_batch_that_is_cut_off_drops_everything() -> None:
    counts = dict.fromkeys(COUNTED, 0)
    blocks = EngineBlocks(START, BLOCK_TOKENS, 10_000, counts)
    long, short = Prompt(tuple(range((SLICE_BLOCKS + 5) * BLOCK_TOKENS))), Prompt((1,) * BLOCK_TOKENS)
    steps = blocks.take(0, [1.5, EngineModel().store(long)])
    next(steps)
    assert len(blocks) == SLICE_BLOCKS
    steps.close()
    assert (len(blocks), counts["drops"]) == (0, 1)
    list(blocks.take(1, [1.5, EngineModel().store(short)]))
    assert blocks.keys() == short.keys()


def test_blocks_of_another_size_get_no_key() -> None:
    counts = dict.fromkeys(COUNTED, 0)
    blocks = EngineBlocks(START, 2 * BLOCK_TOKENS, 10, counts)
    list(blocks.take(0, [1.5, EngineModel().store(Prompt(tuple(range(4 * BLOCK_TOKENS))))]))
    assert (len(blocks), counts["skipped_blocks"]) == (0, 4)


def stored(prompt: Prompt, **more: object) -> dict[str, object]:
    (event,) = EngineModel().store(prompt)
    return event | more


def test_blocks_of_adapters_that_nobody_knows_get_no_key() -> None:
    counts, adapters = dict.fromkeys(COUNTED, 0), {}
    blocks = EngineBlocks(START, BLOCK_TOKENS, 100, counts, adapters)
    prompts = [Prompt((at,) * BLOCK_TOKENS, lora="sql") for at in range(2)]
    list(blocks.take(0, [1.5, [stored(prompts[0])]]))
    assert (len(blocks), counts["skipped_blocks"]) == (0, 1)
    adapters["sql"] = ""
    list(blocks.take(1, [1.5, [stored(prompts[1])]]))
    assert blocks.keys() == prompts[1].keys()


def test_the_group_with_full_attention_counts() -> None:
    whole = Prompt(tuple(range(4 * BLOCK_TOKENS)))
    blocks = EngineBlocks(START, BLOCK_TOKENS, 100, dict.fromkeys(COUNTED, 0))
    window = stored(whole, group_idx=0, kv_cache_spec_kind="sliding_window")
    list(blocks.take(0, [1.5, [window]]))
    assert len(blocks) == 4, "nothing tells of another group yet"
    full = stored(whole, group_idx=1, kv_cache_spec_kind="full_attention")
    gone = {"type": "BlockRemoved", "block_hashes": full["block_hashes"][2:]}
    list(blocks.take(1, [1.5, [full, window, gone | {"group_idx": 0}]]))
    assert len(blocks) == 4
    list(blocks.take(2, [1.5, [gone | {"group_idx": 1}]]))
    assert blocks.keys() == whole.keys()[:2]
    blocks.begin()
    list(blocks.take(0, [1.5, [window]]))
    assert len(blocks) == 4, "another life may have other groups"
