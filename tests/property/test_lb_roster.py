"""What a load balancer keeps of what conductors listed, whatever they say after a restart."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pinyon.routing.roster import Roster

GRACE_S = 10.0
LISTS = st.lists(
    st.tuples(
        st.frozensets(st.sampled_from("abcd")),
        st.booleans(),
        st.booleans(),
        st.floats(0, 15),
    ),
    max_size=30,
)


@given(LISTS)
def test_who_was_listed_stays_until_this_conductor_s_word_or_the_grace_time(
    lists: list[tuple[frozenset[str], bool, bool, float]],
) -> None:
    roster = Roster(GRACE_S)
    listed: frozenset[str] = frozenset()
    kept: frozenset[str] = frozenset()
    whole_since_s: float | None = None
    short = False
    now_s = 0.0
    for ids, first, incomplete, passed_s in lists:
        now_s += passed_s
        if roster.expire(now_s):
            assert whole_since_s is not None
            assert now_s >= whole_since_s + GRACE_S
            kept = frozenset()
        known = listed | kept
        if first:
            whole_since_s, short = None, False
        short |= incomplete and first
        if incomplete:
            whole_since_s = None
        elif whole_since_s is None:
            whole_since_s = now_s
        roster.listed(ids, now_s, first=first, incomplete=incomplete)
        expected = known - ids if first else kept - ids
        if short and not incomplete:
            expected, short = frozenset(), False
        vanished = frozenset() if first else listed - ids
        if len(vanished) >= 2 and len(vanished) > len(listed) / 2:
            expected |= vanished
            whole_since_s = None if incomplete else now_s
        listed, kept = ids, expected
        assert roster.unconfirmed == expected
    if whole_since_s is not None:
        roster.expire(max(now_s, whole_since_s + GRACE_S))
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
    roster.listed("a", 1001.0)
    assert not roster.unconfirmed


def test_those_that_vanish_together_are_kept_for_a_while() -> None:
    """A conductor that stood still for longer than the leases forgets everyone at once."""
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
