"""Checksums of objects that lie in pieces, against those of their bytes in one piece."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_digest

from pinyon.store.checksums import AT_ONCE_BYTES, all_checksums, checksums_of
from pinyon.store.kv_memory import Piece

KEY = b"k" * 16


@given(st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=6), st.integers(1, 8), st.integers(1, 4))
def test_pieces_do_not_matter(pieces: list[bytes], parts: int, repeat: int) -> None:
    whole = b"".join(pieces) * parts * repeat
    memory = memoryview(b"front" + whole)
    cuts, at = [], 5
    while at < len(memory):
        length = min(len(pieces[len(cuts) % len(pieces)]), len(memory) - at)
        cuts.append(Piece(KEY, at, length))
        at += length
    size = len(whole) // parts
    expected = b"".join(xxh3_64_digest(whole[at : at + size]) for at in range(0, len(whole), size))
    assert checksums_of(cuts, {KEY: memory}.get, parts) == expected


def test_the_checksum_is_that_of_the_published_test_vectors() -> None:
    """The value is that of XXH3's specification for the letters "abc" and seed 0."""
    assert checksums_of([Piece(KEY, 0, 3)], {KEY: memoryview(b"abc")}.get) == bytes.fromhex("78af5f94892f3950")


def test_memory_of_a_device_has_no_checksum() -> None:
    assert checksums_of([Piece(KEY, 0, 3)], lambda _: None) is None


def test_unequal_parts_are_refused() -> None:
    with pytest.raises(ValueError, match="3 equal parts"):
        checksums_of([Piece(KEY, 0, 4)], {KEY: memoryview(b"abcd")}.get, 3)


@pytest.mark.parametrize("size", [64, AT_ONCE_BYTES])
async def test_many_objects_have_one_each(size: int) -> None:
    memory = memoryview(bytes(range(256)) * (3 * size // 256 + 1))
    places = [[Piece(KEY, number * size, size)] for number in range(3)]
    found = await all_checksums(places, [1, 1, 2], size, {KEY: memory}.get)
    pairs = [xxh3_64_digest(memory[at : at + size]) for at in (0, size)]
    last = [xxh3_64_digest(memory[at : at + size // 2]) for at in (2 * size, 2 * size + size // 2)]
    assert found == [*pairs, b"".join(last)]
