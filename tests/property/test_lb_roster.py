"""The instances that a load balancer keeps, whatever conductors list after a restart."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pinyon.routing.roster import Roster

GRACE_S = 10.0
LISTS = st.lists(
    st.tuples(st.frozensets(st.sampled_from("abcd")), st.booleans(), st.booleans(), st.floats(0, 15)), max_size=30
)


@given(LISTS)
def test_a_known_instance_stays_until_the_list_or_grace_ends_it(
    lists: list[tuple[frozenset[str], bool, bool, float]],
) -> None:
    roster = Roster(GRACE_S)
    listed: frozenset[str] = frozenset()
    now_s, grace_since_s, short = 0.0, 0.0, False
    for ids, first, incomplete, passed_s in lists:
        now_s += passed_s
        before = roster.unconfirmed
        if roster.expire(now_s):
            assert before
            assert not short
            assert now_s >= grace_since_s + GRACE_S
        elif roster.unconfirmed and not short:
            assert now_s < grace_since_s + GRACE_S
        known, kept = listed | roster.unconfirmed, roster.unconfirmed
        roster.listed(ids, now_s, first=first, incomplete=incomplete)
        missing = known - ids
        assert roster.unconfirmed <= missing, "nobody comes from nowhere, and nobody is both"
        if first or incomplete:
            assert roster.unconfirmed == missing, "such a list is no news of who is not in it"
            grace_since_s = now_s
        else:
            gone = missing if short else missing - kept
            if len(gone) < (1 if short else 2) or len(gone) <= len(known | ids) / 2:
                assert not roster.unconfirmed & gone, "the conductor's word counts"
            else:
                assert roster.unconfirmed == missing, "so many do not go at once"
                grace_since_s = now_s
        listed, short = ids, incomplete
    roster.listed(listed, now_s)
    roster.expire(now_s + GRACE_S)
    assert not roster.unconfirmed, "nothing is kept for ever beside a conductor that speaks"


def test_a_restarted_conductor_s_empty_list_erases_nobody() -> None:
    roster = Roster(GRACE_S)
    roster.listed("ab", 0.0, first=True)
    roster.listed("b", 1.0)
    assert not roster.unconfirmed, "in its own session its word counts"
    roster.listed("", 1.5)
    assert not roster.unconfirmed
    roster.listed("abc", 2.0)
    roster.listed("", 100.0, first=True)
    assert roster.unconfirmed == frozenset("abc")
    roster.listed("b", 101.0)
    assert roster.unconfirmed == frozenset("ac")
    roster.listed("", 102.0)
    assert roster.unconfirmed == frozenset("ac"), "b was listed by this one, and is gone"
    assert not roster.expire(109.9)
    assert roster.expire(110.0)
    assert not roster.unconfirmed


def test_a_conductor_that_says_so_is_believed() -> None:
    roster = Roster(GRACE_S)
    roster.listed("ab", 0.0, first=True)
    roster.listed("", 1.0, first=True, incomplete=True)
    assert not roster.expire(1000.0), "as long as it says that it does not know all"
    assert roster.unconfirmed == frozenset("ab")
    roster.listed("a", 1001.0, incomplete=True)
    roster.listed("", 1002.0, incomplete=True)
    assert roster.unconfirmed == frozenset("ab"), "a connection that broke meanwhile is no news either"
    roster.listed("a", 1003.0)
    assert not roster.unconfirmed
    roster.listed("", 2000.0, first=True, incomplete=True)
    roster.listed("bcd", 2001.0)
    assert not roster.unconfirmed


def test_a_complete_but_empty_list_after_a_restart_erases_nobody() -> None:
    roster = Roster(GRACE_S)
    roster.listed("abcd", 0.0, first=True)
    roster.listed("", 1.0, first=True, incomplete=True)
    roster.listed("", 4.0)
    assert roster.unconfirmed == frozenset("abcd")
    roster.listed("abc", 5.0)
    assert roster.unconfirmed == frozenset("d")
    assert not roster.expire(13.9)
    assert roster.expire(14.0)


def test_those_that_vanish_together_are_kept_for_a_while() -> None:
    """A conductor that was frozen for longer than the leases forgets all instances at once."""
    roster = Roster(GRACE_S)
    roster.listed("abcd", 0.0, first=True)
    roster.listed("ab", 1.0)
    assert not roster.unconfirmed, "half of them may go"
    roster.listed("abcd", 2.0)
    roster.listed("", 100.0)
    assert roster.unconfirmed == frozenset("abcd")
    roster.listed("a", 101.0)
    assert not roster.expire(109.9)
    assert roster.expire(110.0)
    roster.listed("", 111.0)
    assert not roster.unconfirmed
