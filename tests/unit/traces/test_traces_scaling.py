"""A smaller trace keeps whole units, about the requested number of rows, and is equal for equal seeds."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pinyon.core.errors import InvalidArgument
from pinyon_lab.traces import TraceRow
from pinyon_lab.traces.scaling import chosen


def row(chat: str = "", parent: str = "", user: str = "") -> TraceRow:
    return TraceRow(0, 1, 1, (), chat=chat, parent=parent, user=user)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=60), st.floats(0.01, 1), st.integers(0, 9))
def test_whole_users_about_as_many_as_asked(users: list[int], factor: float, seed: int) -> None:
    rows = [row(user=str(user)) for user in users]
    kept = chosen(rows, "user", factor, random.Random(seed))
    assert kept == chosen(rows, "user", factor, random.Random(seed))
    for user in set(users):
        assert len({bool(each) for each, who in zip(kept, users, strict=True) if who == user}) == 1
    # Leaving out any further unit would lead further away from the aim.
    missing = abs(factor * len(users) - sum(kept))
    for user in set(users):
        if not any(each for each, who in zip(kept, users, strict=True) if who == user):
            size = users.count(user)
            assert abs(factor * len(users) - sum(kept) - size) >= missing - 1e-9
    if factor == 1:
        assert all(kept)


def test_a_session_is_its_chain_of_chats() -> None:
    rows = [row("a"), row("b"), row("c", "a"), row("d", "gone"), row("e", "c"), row("f", "gone"), row("b")]
    kept = [tuple(chosen(rows, "session", 0.5, random.Random(seed))) for seed in range(40)]
    for each in kept:
        assert each[0] == each[2] == each[4]
        assert each[1] == each[6]
        assert each[3] == each[5]
    assert len(set(kept)) > 1


def test_requests() -> None:
    assert sum(chosen([row()] * 1000, "request", 0.1, random.Random(1))) == 100


def test_a_row_that_names_none_is_one_by_itself() -> None:
    rows = [row(), row(user="a"), row(), row(user="a"), row(), row(user="b")]
    kept = {tuple(chosen(rows, "user", 0.5, random.Random(seed))) for seed in range(60)}
    assert all(each[1] == each[3] for each in kept)
    for one, other in ((0, 2), (2, 4), (0, 4), (0, 1), (4, 5)):
        assert any(each[one] != each[other] for each in kept), "nobody else's"
    with pytest.raises(InvalidArgument, match="no row names a user"):
        chosen([row(), row()], "user", 0.5, random.Random(1))
