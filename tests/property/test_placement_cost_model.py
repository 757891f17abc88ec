"""Predictions are never negative, and grow with the work, whatever was measured."""

from hypothesis import given
from hypothesis import strategies as st

from pinyon.placement.cost_model import DecodeCostModel, PrefillCostModel

SECONDS = st.floats(0, 3600) | st.sampled_from((0.0, 1e-6, 0.01, 1.0))
TOKENS = st.integers(0, 1 << 21)
BATCH = st.integers(1, 1024)


@given(st.lists(st.tuples(TOKENS, TOKENS, SECONDS), max_size=40), TOKENS, TOKENS, TOKENS)
def test_prefill(measured, prefix, rest, more):
    model = PrefillCostModel()
    for computed, reused, seconds in measured:
        model.observe(computed, reused, seconds)
    took = model.predict_s(prefix + rest, prefix)
    assert 0 <= took <= model.predict_s(prefix + rest + more, prefix)
    assert model.predict_s(prefix + rest, prefix + min(more, rest)) <= took * (1 + 1e-9), "reuse spares time"


@given(st.lists(st.tuples(BATCH, TOKENS, SECONDS), max_size=40), BATCH, TOKENS, BATCH, TOKENS)
def test_decode(measured, batch, tokens, more, further):
    model = DecodeCostModel()
    for size, read, seconds in measured:
        model.observe(size, read, seconds)
    took = model.predict_s(batch, tokens)
    assert 0 <= took <= model.predict_s(batch + more, tokens)
    assert took <= model.predict_s(batch, tokens + further)


@given(
    st.tuples(st.floats(1e-3, 0.1), st.floats(1e-5, 1e-2), st.floats(1e-9, 1e-6)),
    st.floats(0.2, 5.0),
    st.lists(st.tuples(st.integers(1, 64), st.integers(0, 100_000)), min_size=8, max_size=20, unique=True),
)
def test_decode_follows_a_change_of_speed(machine, change, loads):
    """Repeated loads of any kind, then the same at another speed."""
    k0, k1, k2 = machine
    model = DecodeCostModel()
    for factor in (1.0, change):
        for number in range(800):
            batch, tokens = loads[number % len(loads)]
            model.observe(batch, tokens, factor * (k0 + k1 * batch + k2 * tokens))
    for batch, tokens in loads:
        true = change * (k0 + k1 * batch + k2 * tokens)
        assert abs(model.predict_s(batch, tokens) - true) < 0.05 * true
