"""Lists of objects: by page, by use, and by prompt."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinyon.core.errors import InvalidArgument
from pinyon.eviction.interface import Traits
from pinyon.store.disk_log import DiskObject
from pinyon.store.kv_object import KvObject
from pinyon.store.listing import anchors, hottest_first, page_of, with_disk

KEYS = [bytes([n]) * 16 for n in range(200)]
some = st.builds(
    lambda key, size, used_s: KvObject(key, 0, size, used_s=used_s),
    st.sampled_from(KEYS),
    st.integers(1, 1 << 40),
    st.floats(0, 1e9) | st.just(-inf),
)


@given(st.lists(some, unique_by=lambda each: each.key), st.booleans(), st.integers(1, 7))
def test_pages_together_are_all_objects_in_order(objects: list[KvObject], largest: bool, limit: int) -> None:
    found: list[KvObject] = []
    token, pages = b"", 0
    while token or not pages:
        page, token = page_of(objects, limit, token, largest=largest)
        assert len(page) == limit or not token
        found += page
        pages += 1
    assert set(map(id, found)) == set(map(id, objects))
    assert len(found) == len(objects)
    ranks = [-each.size if largest else each.used_s for each in found]
    assert ranks == sorted(ranks)


def test_a_token_of_nobody_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="no page gave this token"):
        page_of([], 1, b"x")


def test_what_is_only_on_the_disk_is_colder_than_all_in_memory() -> None:
    anna = Traits("text/1", "anna")
    above = KvObject(KEYS[0], 0, 64, used_s=-1e9)
    found = with_disk([above], [DiskObject(key, 64, b"", anna, 0) for key in KEYS[:2]])
    (below, kept), _ = page_of(found, 2)
    assert kept is above
    assert (below.key, below.size, below.traits) == (KEYS[1], 64, anna)


def test_the_last_used_come_first_and_those_on_the_disk_last() -> None:
    cold, prompt = KvObject(KEYS[0], 0, 64, used_s=1.0), [KvObject(KEYS[n], 0, 64, used_s=2.0, place=n) for n in (2, 1)]
    disk = [DiskObject(KEYS[3], 64, b""), DiskObject(KEYS[0], 64, b"")]
    assert [each.key for each in hottest_first([cold, *prompt], disk)] == [KEYS[n] for n in (1, 2, 0, 3)]


def test_blocks_are_led_back_to_the_first_one_of_their_prompt() -> None:
    held = {KEYS[n]: KvObject(KEYS[n], 0, 64, place=n, after=KEYS[n - 1]) for n in (1, 2, 3, 5, 6)}
    wanted = [KEYS[n] for n in (6, 3, 2, 1, 4, 5)]
    assert anchors(wanted, held.get) == [KEYS[n] for n in (5, 1, 1, 1, 4, 5)]


def test_wrong_predecessors_end_somewhere() -> None:
    held = {
        KEYS[0]: KvObject(KEYS[0], 0, 64, place=1, after=KEYS[1]),
        KEYS[1]: KvObject(KEYS[1], 0, 64, place=1, after=KEYS[0]),
        KEYS[2]: KvObject(KEYS[2], 0, 64, place=2, after=KEYS[2]),
    }
    assert anchors(KEYS[:3], held.get) == KEYS[:3]
