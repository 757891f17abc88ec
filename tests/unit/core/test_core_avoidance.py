from __future__ import annotations

from pinyon.core.avoidance import Avoidance, blames_peer
from pinyon.core.errors import DeadlineExceeded, Unavailable


def test_the_pause_grows_with_failures_and_ends_with_a_success() -> None:
    avoidance = Avoidance(first_s=1.0, max_s=3.0)
    assert not avoidance.avoids("a", 0.0)
    avoidance.failed("a", 0.0)
    avoidance.failed("a", 0.1)  # this request was on its way when the first one failed
    assert avoidance.avoids("a", 0.99)
    assert not avoidance.avoids("a", 1.0)
    avoidance.failed("a", 1.0)
    assert avoidance.avoids("a", 2.9)
    avoidance.failed("a", 3.0)
    assert avoidance.avoids("a", 5.9)
    assert not avoidance.avoids("a", 6.0)
    avoidance.succeeded("a")
    avoidance.failed("a", 10.0)
    assert not avoidance.avoids("a", 11.0)


def test_failures_that_lie_far_apart_are_no_series() -> None:
    avoidance = Avoidance(first_s=1.0, max_s=4.0)
    for now_s in (0.0, 1.0, 3.0):
        avoidance.failed("a", now_s)
    assert avoidance.left_s("a", 3.0) == 4.0
    avoidance.failed("a", 11.0)
    assert avoidance.left_s("a", 11.0) == 4.0
    avoidance.failed("a", 19.1)
    assert avoidance.left_s("a", 19.1) == 1.0


def test_who_is_left_alone_and_who_was() -> None:
    avoidance = Avoidance(first_s=1.0)
    avoidance.failed("a", 0.0)
    avoidance.failed("b", 0.5)
    assert avoidance.avoided(0.9) == ["a", "b"]
    assert avoidance.avoided(1.0) == ["b"]
    assert "a" in avoidance
    avoidance.succeeded("a")
    assert "a" not in avoidance


def test_a_bounded_number_of_peers_is_remembered() -> None:
    avoidance = Avoidance(max_peers=3)
    for number in range(10):
        avoidance.failed(str(number), 0.0)
    assert len(avoidance._until) == 3
    assert avoidance.avoids("9", 0.1)


def test_what_is_left_of_a_pause_and_news_that_end_it():
    avoidance = Avoidance(first_s=1.0, max_s=8.0)
    assert avoidance.left_s("a", 0.0) == 0
    avoidance.failed("a", -5.0)  # a clock may begin anywhere
    avoidance.failed("a", -4.0)
    assert avoidance.left_s("a", -3.5) == 1.5
    assert avoidance.left_s("a", 7.0) == 0
    avoidance.succeeded("a")
    assert not avoidance.avoids("a", -3.5)


def test_a_success_that_began_before_the_last_failure_is_no_news():
    avoidance = Avoidance(first_s=1.0)
    avoidance.failed("a", 5.0)
    avoidance.failed("a", 5.5)  # within the pause, and a failure all the same
    avoidance.succeeded("a", 5.2)
    assert avoidance.avoids("a", 5.9)
    avoidance.succeeded("a", 5.6)
    assert not avoidance.avoids("a", 5.9)


def test_lateness_counts_only_when_fair_time_was_offered():
    late = DeadlineExceeded("late")
    assert blames_peer(late)
    assert blames_peer(late, 0.3, 1.0)
    assert not blames_peer(late, 0.2, 1.0)
    assert blames_peer(Unavailable("gone"), 0.2, 1.0)


def test_one_tries_an_avoided_peer_while_others_leave_it_alone():
    avoidance = Avoidance(first_s=1.0, max_s=8.0)
    avoidance.tried("a", 0.0)
    assert "a" not in avoidance, "nothing to find out"
    avoidance.failed("a", 0.0)
    avoidance.tried("a", 0.5)
    assert not avoidance.avoids("a", 1.0), "its pause was not over"
    avoidance.tried("a", 1.0)
    assert avoidance.avoids("a", 1.9)
    assert not avoidance.avoids("a", 2.0), "whoever tried it gave up: another may"
    assert "a" in avoidance
    avoidance.tried("a", 2.0)
    avoidance.failed("a", 2.1)  # the one allowed attempt failed
    assert avoidance.avoids("a", 4.0)
    assert not avoidance.avoids("a", 4.1)
    avoidance.tried("a", 5.0)
    avoidance.succeeded("a", 5.0)
    assert "a" not in avoidance
