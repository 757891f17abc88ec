"""The KV that decoded tokens read together, by hand: segments of 256 tokens, blocks of 64."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from pinyon.core.errors import InvalidArgument
from services.worker.engines.decode_plan import KERNELS, DecodePlan, check_kernel, plan_decodes
from services.worker.engines.segments import SEGMENT_TOKENS

BLOCK = 64
PER_SEGMENT = SEGMENT_TOKENS // BLOCK
A, B, C, D = ([number] * PER_SEGMENT for number in (1, 2, 3, 4))
"""The blocks of a segment; their numbers do not matter."""


def plan(kernel: str, *requests: tuple[int, Sequence[int]]) -> DecodePlan:
    """Returns the plan for requests with these numbers of tokens (the last is the decoded one) in these blocks."""
    ends = [tokens for tokens, _ in requests]
    tables = [np.array(blocks[: -(-tokens // BLOCK)], np.int64) for tokens, blocks in requests]
    rows = range(10, 10 + len(requests))
    return plan_decodes(rows, [end - 1 for end in ends], tables, kernel, BLOCK)


def shared(found: DecodePlan) -> list[tuple[list[int], int]]:
    """Returns the requests and the number of segments of each run."""
    return sorted(
        (sorted((found.rows[run.first : run.first + run.count] - 10).tolist()), len(run.pieces)) for run in found.shared
    )


def test_plain_shares_nothing() -> None:
    found = plan("plain", (513, [*A, *B, 7]), (513, [*A, *B, 8]))
    assert found.shared == []
    assert found.tokens_read == 1026
    assert found.rows.tolist() == [10, 11]
    # One call has four segments; another has two last segments of 64 keys, of which one key counts.
    assert [(len(stack.requests), stack.length, stack.ends) for stack in found.stacks] == [
        (4, 256, None),
        (2, 64, [1, 1]),
    ]


@pytest.mark.parametrize("kernel", ["whole", "grouped"])
def test_what_all_share_is_read_once(kernel: str) -> None:
    found = plan(kernel, (600, [*A, *B, 7, 7]), (700, [*A, *B, 8, 8, 8]), (513, [*A, *B, 9]))
    assert shared(found) == [([0, 1, 2], 2)]
    assert found.tokens_read == 512 + 88 + 188 + 1


def test_one_stranger_leaves_nothing_that_all_share() -> None:
    requests = [(600, [*A, *B, 7, 7])] * 3 + [(600, [*C, *B, 8, 8])]
    assert plan("whole", *requests).shared == []
    found = plan("grouped", *requests)
    assert shared(found) == [([0, 1, 2], 2)]
    assert found.tokens_read == 512 + 3 * 88 + 600


def test_groups_split_like_a_tree() -> None:
    found = plan(
        "grouped",
        (769, [*A, *B, *C, 7]),
        (300, [*D, 8]),
        (769, [*A, *C, *C, 7]),
        (769, [*A, *B, *D, 7]),
        (769, [*A, *C, *C, 8]),
    )
    assert shared(found) == [([0, 2, 3, 4], 1), ([0, 3], 1), ([2, 4], 2)]
    # 256 (A) + 256 (B) + 512 (C C), then C and D alone, the last tokens and the stranger.
    assert found.tokens_read == 256 + 256 + 512 + 256 + 256 + 4 + 300


def test_a_part_that_ends_within_a_segment_is_not_shared_there() -> None:
    found = plan("grouped", (600, [*A, 5, 5, 5, 6, 6, 6]), (600, [*A, 5, 5, 5, 7, 7, 7]))
    assert shared(found) == [([0, 1], 1)]


def test_a_segment_is_shared_by_those_that_have_all_of_it() -> None:
    # 512 tokens end with segment 1, 511 within it.
    found = plan("grouped", (512, [*A, *B]), (512, [*A, *B]), (511, [*A, *B]))
    assert shared(found) == [([0, 1], 1), ([0, 1, 2], 1)]
    assert found.tokens_read == 256 + 256 + 255
    assert [(stack.length, stack.ends) for stack in found.stacks] == [(256, [255])]


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_segment_of_every_request_has_a_place_of_its_own(kernel: str) -> None:
    found = plan(kernel, (769, [*A, *B, *C, 7]), (20, [8]), (700, [*A, *B, *D]), (20, [9]), (769, [*A, *B, *C, 7]))
    places = [run.places.ravel() for run in found.shared] + [stack.places for stack in found.stacks]
    assert sorted(np.concatenate(places).tolist()) == list(range(4 + 1 + 3 + 1 + 4))
    assert found.parts == 13
    assert sorted(found.rows.tolist()) == [10, 11, 12, 13, 14]
    merged = np.concatenate([each.requests for each in found.merges])
    assert sorted(merged.tolist()) == [0, 1, 2, 3, 4]
    assert sum(each.segments * len(each.requests) for each in found.merges) == found.parts


def test_a_kernel_that_there_is_not_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="kernel must be one of"):
        check_kernel("flash")
