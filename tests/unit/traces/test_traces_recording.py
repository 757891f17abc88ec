"""Recorded requests become rows that share what the prompts share, and disclose nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinyon.core.block_keys import tokens_to_bytes, unpack_keys
from pinyon.core.errors import InvalidArgument, ResourceExhausted
from pinyon.core.request import RequestClass
from pinyon.core.trace_hashes import BLOCK_TOKENS, hashed_blocks, hashed_name
from pinyon_lab.traces import TraceRow
from pinyon_lab.traces.recording import Recorded, Renumbering, in_sessions

SALT = b"s" * 16
NOBODY = RequestClass()


def recorded(tokens: list[int], asked: RequestClass = NOBODY, model: str = "m", salt: bytes = SALT) -> Recorded:
    return Recorded(
        *(1.5, asked.kind, asked.turn),
        hashed_name(salt, asked.tenant, asked.user),
        hashed_name(salt, asked.session),
        *(len(tokens), 3),
        hashed_blocks(salt, model, asked, tokens_to_bytes(tokens)),
    )


prompts = st.lists(st.lists(st.sampled_from([7, 8]), min_size=1, max_size=3 * BLOCK_TOKENS), min_size=1, max_size=12)


@given(prompts, st.lists(st.sampled_from(["", "acme"]), min_size=12, max_size=12))
def test_ids_are_equal_where_prefixes_are(asks: list[list[int]], tenants: list[str]) -> None:
    """The ids agree with the prefixes, numbered in order of arrival, the last prefix whatever its length."""
    numbers = Renumbering()
    known: dict[tuple[str, tuple[int, ...]], int] = {}
    for tokens, tenant in zip(asks, tenants, strict=False):
        ends = [*range(BLOCK_TOKENS, len(tokens), BLOCK_TOKENS), len(tokens)]
        expected = tuple(known.setdefault((tenant, tuple(tokens[:end])), len(known)) for end in ends)
        assert numbers.row(recorded(tokens, RequestClass(tenant=tenant))).blocks == expected
    assert set(known.values()) == set(range(len(known)))


def test_what_may_not_be_shared_has_other_ids() -> None:
    tokens = list(range(40))
    base = recorded(tokens)
    assert len(unpack_keys(base.blocks)) == 3
    others = [
        recorded(tokens, model="other"),
        recorded(tokens, RequestClass(tenant="t")),
        recorded(tokens, RequestClass(cache_salt="c")),
        recorded(tokens, salt=b"t" * 16),
    ]
    for other in others:
        assert not set(unpack_keys(base.blocks)) & set(unpack_keys(other.blocks))
    assert recorded(tokens, RequestClass(kind="chat", turn=4, user="u", session="s")).blocks == base.blocks


def test_rows_say_who_and_after_whom_by_numbers() -> None:
    numbers = Renumbering()

    def row(user: str, session: str, turn: int) -> TraceRow:
        return numbers.row(recorded([1] * 17, RequestClass(kind="chat", turn=turn, user=user, session=session)))

    rows = [row("anna", "x", 1), row("ben", "", 1), row("anna", "x", 2), row("", "", 1), row("anna", "x", 3)]
    rows = list(in_sessions(rows))
    assert [each.chat for each in rows] == ["0", "1", "2", "3", "4"]
    assert [each.parent for each in rows] == ["", "", "0", "", "2"]
    assert [each.user for each in rows] == ["1", "2", "1", "", "1"]
    assert rows[2] == TraceRow(1.5, 17, 3, (0, 1), "chat", 2, "2", "0", "1")


def test_who_comes_after_whom_is_by_when_they_came() -> None:
    """The rows are recorded in the order of the requests' ends."""
    numbers = Renumbering()
    told = [
        numbers.row(recorded([1], RequestClass(session=session))._replace(arrived_unix_s=float(came)))
        for session, came in (("x", 2), ("y", 3), ("x", 1), ("x", 4))
    ]
    rows = list(in_sessions(sorted(told, key=lambda row: row.time_s)))
    assert [(row.time_s, row.chat, row.parent) for row in rows] == [
        (1.0, "2", ""),
        (2.0, "0", "2"),
        (3.0, "1", ""),
        (4.0, "3", "0"),
    ]


def test_names_are_not_run_together() -> None:
    assert hashed_name(SALT, "ab", "c") != hashed_name(SALT, "a", "bc")
    assert hashed_name(SALT, "", "a") != hashed_name(SALT, "a", "")
    assert hashed_name(SALT, "", "") == b""
    assert hashed_name(b"t" * 16, "a") != hashed_name(SALT, "a")


def test_what_makes_no_sense_is_refused_and_so_is_too_much() -> None:
    numbers = Renumbering(blocks_max=4, names_max=2)
    whole = recorded(list(range(32)))
    for blocks in (whole.blocks[:-1], whole.blocks[:16], whole.blocks * 2):
        with pytest.raises(InvalidArgument):
            numbers.row(whole._replace(blocks=blocks))
    assert numbers.row(whole).chat == "0", "what is refused counts for nothing"
    assert numbers.row(recorded(list(range(32, 64)))).blocks == (2, 3)
    with pytest.raises(ResourceExhausted, match="as many different blocks"):
        numbers.row(recorded([9]))


def test_sessions_are_forgotten_one_by_one() -> None:
    numbers = Renumbering(names_max=2)
    rows = [numbers.row(recorded([1], RequestClass(session=session))) for session in "abcbcbac"]
    assert [each.parent for each in in_sessions(rows)] == ["", "", "", "1", "2", "3", "", ""]
    known = [numbers.row(recorded([1], RequestClass(session=session))) for session in "dede"]
    assert [each.parent for each in in_sessions(known, names_max=1)] == ["", "", "", ""]
