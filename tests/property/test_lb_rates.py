"""Tenants' limits per minute: no tenant exceeds the bucket and its refill, and the hint is right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinyon.core.errors import ResourceExhausted
from pinyon.routing.rates import Rates, TenantRates

STEPS = st.lists(st.tuples(st.floats(0, 30), st.integers(1, 120), st.integers(0, 120)), max_size=60)


def refusal(table: TenantRates, rates: Rates, tokens: int, now_s: float) -> ResourceExhausted | None:
    try:
        table.take("t", rates, tokens, now_s)
    except ResourceExhausted as error:
        return error
    return None


@given(st.integers(1, 100), STEPS)
def test_tokens_over_any_time_are_bounded_and_the_hint_is_true(tpm: int, steps: list[tuple[float, int, int]]) -> None:
    rates, table = Rates(tpm=tpm), TenantRates()
    now_s, used = 0.0, [(0.0, 0.0)]
    for passed_s, tokens, unused in steps:
        now_s += passed_s
        refused = refusal(table, rates, tokens, now_s)
        if tokens > tpm:
            assert refused is not None
            assert refused.retry_after_s is None, "trying again never helps"
            continue
        if refused is not None:
            assert refused.retry_after_s
            assert refusal(table, rates, tokens, now_s + 0.9 * refused.retry_after_s)
            now_s += refused.retry_after_s
            assert refusal(table, rates, tokens, now_s) is None, "the hint was too early"
        spent = max(0, tokens - unused)
        table.give_back("t", rates, tokens - spent, now_s)
        used.append((now_s, spent))
        for at, (since_s, _) in enumerate(used):
            in_window = sum(amount for _, amount in used[at:])
            assert in_window <= tpm * (1 + (now_s - since_s) / 60) * (1 + 1e-6), "more than flows in"
        requests, level = table.levels("t", rates, now_s)
        assert requests is None
        assert level is not None
        assert 0 <= level.remaining <= level.limit == tpm
        assert level.remaining == pytest.approx(tpm - level.full_s * tpm / 60, abs=1)


def test_requests_and_tokens_are_counted_apart_and_by_tenant() -> None:
    rates, table = Rates(rpm=2, tpm=100), TenantRates()
    table.request("a", rates, 0.0)
    table.request("a", rates, 0.0)
    with pytest.raises(ResourceExhausted, match="2 requests per minute") as caught:
        table.request("a", rates, 15.0)
    assert caught.value.retry_after_s == pytest.approx(15.0)
    table.request("a", rates, 30.0)
    table.request("b", rates, 30.0)
    table.take("a", rates, 100, 30.0)
    with pytest.raises(ResourceExhausted, match="100 tokens per minute"):
        table.take("a", rates, 1, 30.0)
    table.give_back("a", rates, 40, 30.0)
    requests, tokens = table.levels("a", rates, 30.0)
    assert (requests, tokens) == ((2, 0, 60.0), (100, 40, 36.0))
    assert table.levels("nobody", rates, 30.0) == ((2, 2, 0.0), (100, 100, 0.0))
    assert table.levels("a", Rates(), 30.0) == (None, None)


@given(st.integers(1, 5), st.lists(st.floats(0, 40), max_size=40))
def test_a_look_says_what_asking_would_and_takes_nothing(rpm: int, gaps: list[float]) -> None:
    rates, table, now_s = Rates(rpm=rpm), TenantRates(), 0.0

    def refused(ask: Callable[[str, Rates, float], None]) -> tuple[str, float | None] | None:
        try:
            ask("t", rates, now_s)
        except ResourceExhausted as error:
            return error.message, error.retry_after_s
        return None

    for gap in gaps:
        now_s += gap
        look = refused(table.check)
        assert refused(table.check) == look
        assert refused(table.request) == look


def test_without_a_limit_nothing_is_refused() -> None:
    table = TenantRates()
    for _ in range(1000):
        table.request("t", Rates(), 0.0)
        table.take("t", Rates(), 10**9, 0.0)


def test_a_limit_that_changes_counts_what_was_taken() -> None:
    table = TenantRates()
    table.take("t", Rates(tpm=100), 60, 0.0)
    assert table.levels("t", Rates(tpm=200), 0.0)[1] == (200, 140, 18.0)
    assert table.levels("t", Rates(tpm=50), 0.0)[1] == (50, 0, 60.0)


def test_the_table_is_bounded() -> None:
    table = TenantRates(tenants_max=3)
    for name in "abcad":
        table.request(name, Rates(rpm=1000), 0.0)
    assert len(table) == 3
    levels = {name: table.levels(name, Rates(rpm=1000), 0.0)[0] for name in "abcd"}
    assert {name: level.remaining for name, level in levels.items() if level is not None} == {
        "a": 998, "b": 1000, "c": 999, "d": 999
    }  # fmt: skip
