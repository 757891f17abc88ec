"""The pool's knowledge of its instances' rows and places."""

from __future__ import annotations

from dataclasses import replace

from pinyon.placement.policy import Pool
from tests.unit.placement.conftest import DECODE, MIXED, PREFILL, make_fleet


def pool_of_four() -> Pool:
    (pool,) = make_fleet(("a", PREFILL), ("c", MIXED), ("b", DECODE), ("d", MIXED)).pools("m")
    return pool


def test_rows_and_places_are_those_of_its_instances() -> None:
    pool = pool_of_four()
    assert list(pool.row_numbers) == [state.row for state in pool.prefills]
    assert list(pool.decode_row_numbers) == [state.row for state in pool.decodes]
    assert pool.last_row == max(state.row for state in pool.prefills)
    assert pool.place_of == {"a": 0, "c": 1, "d": 2}


def test_they_are_worked_out_once() -> None:
    """The values are computed once in the compiled module too."""
    pool = pool_of_four()
    assert pool.place_of is pool.place_of


def test_a_smaller_pool_has_its_own() -> None:
    pool = pool_of_four()
    assert len(pool.row_numbers) == 3
    assert list(replace(pool, prefills=pool.prefills[1:]).row_numbers) == list(pool.row_numbers)[1:]
    assert pool.without(frozenset({"c"})).place_of == {"a": 0, "d": 1}
    assert pool == replace(pool)
