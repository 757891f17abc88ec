from __future__ import annotations

import pytest

from pinyon.eviction import EvictionPolicy, Lru


def test_least_recently_used_goes_first() -> None:
    lru: EvictionPolicy[str] = Lru()
    lru.insert("abc", now_s=1.0)
    lru.touch("a", now_s=2.0)
    lru.remove(["b"])
    lru.insert(["b"])
    assert "b" in lru
    assert [lru.victim() for _ in range(4)] == ["c", "a", "b", None]
    assert len(lru) == 0


def test_unknown_items_are_errors() -> None:
    lru: Lru[str] = Lru()
    with pytest.raises(KeyError):
        lru.touch("x")
    with pytest.raises(KeyError):
        lru.remove(["x"])
