"""How long one that comes now would wait for KV memory."""

from __future__ import annotations

import pytest

from pinyon.decisions.room_waits import FORGET_S, RoomWaits


def test_the_longest_wait_so_far_or_what_others_waited() -> None:
    waits = RoomWaits()
    assert waits.wait_s(1.0) == 0.0
    waits.began(1, 1.0)
    waits.began(2, 3.0)
    assert waits.wait_s(5.0) == 4.0
    waits.granted(1, 11.0)
    assert waits.wait_s(11.0) == 8.0, "the second one waits since then"
    assert waits.wait_s(4.0) == pytest.approx(2.0), "a fifth of ten"
    waits.left(2)
    assert waits.wait_s(20.0) == 0.0, "nobody waits"


def test_who_is_not_counted_tells_nothing() -> None:
    waits = RoomWaits()
    waits.granted(7, 100.0)
    waits.left(8)
    waits.began(1, 100.0)
    assert waits.wait_s(100.0) == 0.0


def test_what_was_long_ago_tells_nothing() -> None:
    waits = RoomWaits()
    waits.began(1, 0.0)
    waits.granted(1, 600.0)
    waits.began(2, 600.0 + FORGET_S)
    assert waits.wait_s(600.0 + FORGET_S) == pytest.approx(120.0)
    waits.left(2)
    waits.began(3, 601.0 + FORGET_S)
    assert waits.wait_s(601.0 + FORGET_S) == 0.0
