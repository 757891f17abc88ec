from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pinyon.store.allocator import IdleRoom, OffsetAllocator
from tests.long import usually
from tests.store_integrity import check_allocator

CAPACITY = 4096
steps = st.lists(st.one_of(st.integers(1, 1500), st.integers(-20, -1)), max_size=60)


@settings(max_examples=usually(25, long=150))
@given(steps=steps, alignment=st.sampled_from([1, 64, 256]))
def test_ranges_never_overlap_and_all_room_comes_back(steps: list[int], alignment: int) -> None:
    allocator = OffsetAllocator(CAPACITY, alignment)
    owner = [0] * CAPACITY  # the model: the owner of each byte
    taken: list[tuple[int, int]] = []
    for number, step in enumerate(steps, 1):
        if step > 0:
            offset = allocator.allocate(step)
            size = -(-step // alignment) * alignment
            if offset is None:
                assert "0" * size not in "".join(str(min(1, each)) for each in owner)
                continue
            assert offset % alignment == 0
            assert not any(owner[offset : offset + size])
            owner[offset : offset + size] = [number] * size
            taken.append((offset, size))
        elif taken:
            offset, size = taken.pop(step % len(taken))
            allocator.free(offset)
            owner[offset : offset + size] = [0] * size
        check_allocator(allocator)
        assert allocator.used_bytes == sum(map(bool, owner))
    for offset, _ in taken:
        allocator.free(offset)
    assert allocator.used_bytes == 0
    assert allocator.largest_hole_bytes == allocator.capacity_bytes == CAPACITY


def test_the_best_hole_is_used() -> None:
    allocator = OffsetAllocator(1024, 64)
    ranges = [allocator.allocate(size) for size in (128, 64, 256, 64, 192, 320)]
    for index in (0, 2, 4):
        allocator.free(ranges[index] or 0)
    assert allocator.allocate(257) is None
    assert allocator.allocate(190) == ranges[4]
    assert allocator.allocate(100) == ranges[0]
    assert allocator.allocate(256) == ranges[2]
    assert allocator.largest_hole_bytes == 0


@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=10), freed=st.sets(st.integers(0, 9)), data=st.data())
def test_neighbours_that_make_room_are_found(sizes: list[int], freed: set[int], data: st.DataObject) -> None:
    allocator = OffsetAllocator(64 * 20, 64)
    idle = IdleRoom(allocator)
    taken = [(offset, size) for size in sizes if (offset := allocator.allocate(64 * size)) is not None]
    for offset, _ in [one for index, one in enumerate(taken) if index in freed]:
        allocator.free(offset)
    left = {bytes([index]): one for index, one in enumerate(taken) if index not in freed}
    may_go = data.draw(st.lists(st.sampled_from(sorted(left)), unique=True)) if left else []
    owner = ["."] * 20  # the model: a mark per 64 bytes
    for key, (offset, size) in left.items():
        mark = "?" if key in may_go else "x"
        owner[offset // 64 : offset // 64 + size] = mark * size
    for key in may_go:
        idle.add(key, left[key][0], 64 * left[key][1] - 1)
    most = max([len(hole) for hole in "".join(owner).replace("?", "x").split("x")])
    wanted = data.draw(st.integers(most + 1, 20)) if most < 20 else 20
    possible = wanted <= max(len(run) for run in "".join(owner).split("x"))
    found = idle.any_run(64 * wanted, 0.0)
    assert bool(found) == (possible and most < 20)
    if not found:
        assert idle.any_run(64 * wanted, 0.9) == []
        return
    assert len(set(found)) == len(found)
    assert sum(left[key][1] for key in found) < wanted + max(sizes)
    for key in found:
        idle.take(left[key][0])
        allocator.free(left[key][0])
    check_allocator(allocator)
    assert allocator.allocate(64 * wanted) is not None
    assert idle.all_bytes == 64 * sum(left[key][1] for key in may_go if key not in found)


def test_misuse_is_refused() -> None:
    allocator = OffsetAllocator(1024, 64)
    offset = allocator.allocate(10)
    assert offset is not None
    allocator.free(offset)
    for wrong in (offset, 1, -64):
        with pytest.raises(ValueError, match="nothing was allocated"):
            allocator.free(wrong)
    with pytest.raises(ValueError, match="at least one byte"):
        allocator.allocate(0)
    with pytest.raises(ValueError, match="power of two"):
        OffsetAllocator(1024, 48)
    with pytest.raises(ValueError, match="hold nothing"):
        OffsetAllocator(63, 64)


def test_many_equal_objects_stay_fast() -> None:
    """The test counts steps, not time: a full pool of equal objects has at most one size of hole while it churns."""
    allocator = OffsetAllocator(64 * 10_000, 64)
    offsets = [allocator.allocate(64) for _ in range(10_000)]
    assert allocator.allocate(64) is None
    for offset in offsets[::2]:
        allocator.free(offset or 0)
    assert len(allocator._sizes) == 1
    assert allocator.allocate(65) is None
