"""The batches of FEATHER's chapter 3 match their names, and fit."""

from __future__ import annotations

import pytest

from bench.sharing import BATCH, BLOCK_TOKENS, EXPERIMENTS, POOL_BLOCKS, PREFIX_TOKENS, slots_of
from pinyon.batching import DecodeSlot
from pinyon_lab.simulator.engine import shared_blocks

PREFIX_BLOCKS = PREFIX_TOKENS // BLOCK_TOKENS


def made(experiment: str) -> dict[str, list[list[DecodeSlot]]]:
    """Returns the slots of each point of an experiment, by the point's name."""
    (found,) = [make for name, make in EXPERIMENTS.items() if name.startswith(experiment)]
    slots = {}
    for point in found():
        taken: dict[tuple[str, ...], list[int]] = {}
        slots[point.name] = [slots_of(batch, range(POOL_BLOCKS), taken) for batch in point.batches]
    return slots


def shared(batches: list[list[DecodeSlot]]) -> list[int]:
    """Returns the blocks that all requests of each batch share."""
    return [shared_blocks([slot.block_table for slot in batch]) for batch in batches]


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_batch_fits_and_has_blocks_for_its_tokens(experiment: str) -> None:
    for batches in made(experiment).values():
        assert batches
        for slots in batches:
            for slot in slots:
                assert len(set(slot.block_table)) == len(slot.block_table) == (slot.position + 1) // BLOCK_TOKENS
                assert max(slot.block_table) < POOL_BLOCKS


def test_what_batches_share() -> None:
    first = made("1")
    assert {name: shared(batches) for name, batches in first.items()} == {
        "32 of 32 with A": [PREFIX_BLOCKS],
        **{f"{BATCH - others} of 32 with A": [0] for others in (1, 4, 8, 16)},
    }
    assert [shared(batches)[0] for batches in made("2").values()] == [0, 32, 64, 96, 128]
    assert [shared(batches)[0] for batches in made("4").values()] == [PREFIX_BLOCKS, 32, 32, 32]
    assert shared(made("6")["f1 50 %, f2 75 %"]) == [PREFIX_BLOCKS // 2]
    assert shared(made("6")["f1 0 %, f2 100 %"]) == [PREFIX_BLOCKS]
    eighth = made("8")
    assert shared(eighth["2 x 16"]) == [0, 0]
    assert shared(eighth["4 x 8"]) == [PREFIX_BLOCKS] * 4
    blocks = {block for batch in eighth["4 x 8"] for slot in batch for block in slot.block_table}
    assert len(blocks) == 4 * PREFIX_BLOCKS + BATCH
