from __future__ import annotations

from pinyon.decisions.room_waits import COUNTED, FORGET_S, LEAST_S, RoomWaits


def test_one_that_waits_alone_tells_how_long_it_does() -> None:
    waits = RoomWaits()
    assert waits.wait_s(1.0) == 0.0
    waits.began(1, 1.0)
    assert waits.wait_s(1.0) == LEAST_S, "0 says that nobody waits"
    assert waits.wait_s(5.0) == 4.0
    waits.left(1, 5.0)
    assert waits.wait_s(5.0) == 0.0


def test_in_order_of_arrival_it_is_what_the_first_ones_waited() -> None:
    """Each second one request comes, and one has room ten seconds after it came."""
    waits = RoomWaits()
    for second in range(60):
        if second >= 10:
            waits.granted(second - 10, float(second))
        waits.began(second, float(second))
    assert waits.wait_s(59.0) == 10.0


def test_those_that_are_passed_by_do_not_tell_of_those_that_pass() -> None:
    """Each second a request comes that has room half a second later; two large requests have waited all the while."""
    waits = RoomWaits()
    waits.began(1000, 0.0)
    waits.began(1001, 0.0)
    for second in range(100):
        waits.began(second, float(second))
        waits.granted(second, second + 0.5)
    assert waits.wait_s(99.5) == 0.5


def test_served_requests_do_not_hide_the_wait_of_unserved_ones() -> None:
    """Each second three requests come: one has room at once and two never have, so most wait as long as time lasts."""
    waits = RoomWaits()
    for second in range(40):
        for each in range(3):
            waits.began(3 * second + each, float(second))
        waits.granted(3 * second, second + 0.5)
    assert waits.wait_s(39.5) > 5.0


def test_who_gave_up_waited_as_long_as_it_did() -> None:
    waits = RoomWaits()
    waits.began(0, 0.0)
    waits.began(1, 1.0)
    waits.left(0, 20.0)
    assert waits.wait_s(30.0) == 30.0, "nobody had room"
    waits.granted(1, 40.0)
    waits.began(2, 40.0)
    assert waits.wait_s(40.0) == 39.0, "of 20 and 39"
    waits.began(3, 40.0)
    waits.granted(3, 40.0)
    assert waits.wait_s(40.0) == 20.0, "of 0, 20 and 39"


def test_the_line_stands_still_for_as_long_as_nobody_has_a_turn() -> None:
    waits = RoomWaits()
    waits.began(1000, 0.0)
    for number in range(2 * COUNTED):
        waits.began(number, 0.0)
        waits.granted(number, 0.0)
    assert waits.wait_s(0.0) == LEAST_S
    assert waits.wait_s(7.0) == 7.0


def test_who_is_not_counted_tells_nothing() -> None:
    waits = RoomWaits()
    waits.granted(7, 100.0)
    waits.left(8, 100.0)
    waits.began(9, 100.0)
    waits.granted(9, 100.0)  # no request waited then
    waits.began(1, 100.0)
    assert waits.wait_s(100.0) == LEAST_S


def test_what_was_long_ago_tells_nothing() -> None:
    waits = RoomWaits()
    waits.began(1, 0.0)
    waits.granted(1, 600.0)
    waits.began(2, 600.0 + FORGET_S)
    assert waits.wait_s(600.0 + FORGET_S) == 600.0
    waits.left(2, 600.0 + FORGET_S)
    waits.began(3, 601.0 + FORGET_S)
    assert waits.wait_s(601.0 + FORGET_S) == LEAST_S
