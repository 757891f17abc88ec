"""Objects that lie in pieces, cut for transfers between memories of other shapes."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pinyon.store.kv_memory import KvMemory, LayerMemory, Piece, RemotePiece, side_by_side
from pinyon.transfer import Access, Region, RegionDescriptor

REGION = Region(memoryview(bytearray(1)), "", Access.NONE)
THERE = RegionDescriptor(b"t" * 16, "cpu:0", 1 << 20)


def cut(total: int, at: list[int]) -> list[int]:
    ends = [*sorted({each % total for each in at} - {0}), total]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


@given(st.integers(1, 400), st.lists(st.integers(0, 400), max_size=6), st.lists(st.integers(0, 400), max_size=6))
def test_every_byte_goes_to_its_place_in_as_few_parts_as_can_be(total: int, here: Any, there: Any) -> None:
    ours, theirs = cut(total, here), cut(total, there)
    pieces = [Piece(bytes([number]) * 16, 1000 * number, length) for number, length in enumerate(ours)]
    remote = [RemotePiece(THERE, 5000 * number, length) for number, length in enumerate(theirs)]
    parts = list(side_by_side(pieces, remote))
    moved = [
        ((piece.region_key, piece.offset + at), far.offset + at) for piece, far in parts for at in range(piece.length)
    ]
    flat = [(piece.region_key, piece.offset + at) for piece in pieces for at in range(piece.length)]
    far_flat = [each.offset + at for each in remote for at in range(each.length)]
    assert moved == list(zip(flat, far_flat, strict=True))
    assert len(parts) == len({*accumulate(ours), *accumulate(theirs)})


def test_a_block_s_object_is_its_layers_in_order() -> None:
    memory = KvMemory([LayerMemory(REGION, 0, 64, 32), LayerMemory(REGION, 1000, 48, 16)])
    assert memory.object_bytes == 48
    assert memory.pieces(3) == [Piece(REGION.key, 192, 32), Piece(REGION.key, 1144, 16)]
    assert KvMemory.whole(REGION, 10).pieces(2) == [Piece(REGION.key, 20, 10)]
