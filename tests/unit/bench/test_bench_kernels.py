from __future__ import annotations

import numpy as np

from bench.kernels import BATCH, BLOCK_TOKENS, GROUPS, OWN_TOKENS, PREFIX_TOKENS, medians_ms, slots_of, tables


def test_requests_of_a_group_share_its_prefix_and_nothing_else() -> None:
    shared = PREFIX_TOKENS // BLOCK_TOKENS
    for groups in GROUPS:
        found = tables(groups, np.random.default_rng(1))
        assert len(found) == BATCH
        assert {len(table) for table in found} == {shared + OWN_TOKENS // BLOCK_TOKENS}
        assert len({tuple(table[:shared]) for table in found}) == groups
        own = [block for table in found for block in table[shared:]]
        prefixes = {block for table in found for block in table[:shared]}
        assert len(set(own)) == len(own)
        assert prefixes.isdisjoint(own)
        # Each request needs all of its blocks.
        assert {slot.position // BLOCK_TOKENS for slot in slots_of(found)} == {len(found[0]) - 1}


def test_jobs_take_turns() -> None:
    done: list[str] = []
    medians = medians_ms({"a": lambda: done.append("a"), "b": lambda: done.append("b")}, 2)
    assert done == ["a", "b"] * 3
    assert set(medians) == {"a", "b"}
