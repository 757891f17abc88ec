""":class:`Tally` and :class:`Count` show what prometheus_client's own histograms and counters show."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from pinyon.runtime.tally import Count, Tally

BOUNDS = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=8, unique=True).map(sorted)
VALUES = st.lists(st.tuples(st.sampled_from("mn"), st.floats(-2e6, 2e6) | st.sampled_from([0.0, 1.0])))
LABELS = st.tuples(st.sampled_from(("chat", 'a"b\\c\n')), st.sampled_from((200, 503)))


def page(registry):
    """Lines, without the times at which the library's own series began."""
    return {line for line in generate_latest(registry).decode().splitlines() if "_created" not in line}


@given(BOUNDS, VALUES, st.booleans())
@example([0.0, 1.0], [("m", value) for value in (0.0, 1.0, 1.5, 0.5, -1.0)], False)
@example([-1.0, 1.0], [("m", 0.0)], True)
def test_it_shows_what_a_histogram_shows(bounds, values, labelled):
    registry, expected = CollectorRegistry(auto_describe=True), CollectorRegistry(auto_describe=True)
    ours = Tally("seconds", "Some time", "model" if labelled else "", buckets=bounds, registry=registry)
    theirs = Histogram("seconds", "Some time", ("model",) if labelled else (), buckets=bounds, registry=expected)
    assert page(registry) == page(expected)
    if labelled:
        ours.show("shown")
        theirs.labels("shown")
    for model, value in values:
        if labelled:
            ours.observe(value, model)
            theirs.labels(model).observe(value)
        else:
            ours.observe(value)
            theirs.observe(value)
    assert page(registry) == page(expected)


@pytest.mark.parametrize("bounds", [[], [1.0, 1.0], [2.0, 1.0]])
def test_bounds_that_do_not_rise_are_refused(bounds):
    with pytest.raises(ValueError, match="must rise"):
        Tally("seconds", "Some time", buckets=bounds, registry=CollectorRegistry())


@pytest.mark.parametrize("suffix", ["", "_total"])
@given(added=st.lists(st.tuples(LABELS, st.integers(0, 5))))
def test_it_shows_what_a_counter_shows(suffix, added):
    registry, expected = CollectorRegistry(auto_describe=True), CollectorRegistry(auto_describe=True)
    ours = Count(f"requests{suffix}", "Some requests", ("route", "status"), registry=registry)
    plain = Count(f"plain{suffix}", "All", registry=registry)
    theirs = Counter("requests_total", "Some requests", ("route", "status"), registry=expected)
    total = Counter("plain_total", "All", registry=expected)
    assert page(registry) == page(expected)
    for labels, amount in added:
        ours.add(labels, amount)
        plain.add()
        theirs.labels(*map(str, labels)).inc(amount)
        total.inc()
    assert page(registry) == page(expected)


def test_a_count_without_its_labels_is_refused():
    with pytest.raises(ValueError, match="has the labels"):
        Count("requests_total", "Some requests", ("outcome",), registry=CollectorRegistry()).add()
