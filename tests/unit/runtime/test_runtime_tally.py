"""What :class:`Tally` and :class:`Count` show is what prometheus_client's own histograms and counters show."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from pinyon.runtime.tally import Count, Tally

BOUNDS = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=8, unique=True).map(sorted)


@given(BOUNDS, st.lists(st.one_of(st.floats(-2e6, 2e6), st.sampled_from([0.0, 1.0]))))
@example([0.0, 1.0], [0.0, 1.0, 1.5, 0.5, -1.0])
@example([-1.0, 1.0], [0.0])
def test_it_shows_what_a_histogram_shows(bounds, values):
    shown = []
    for kind in (Histogram, Tally):
        registry = CollectorRegistry(auto_describe=True)
        histogram = kind("seconds", "Some time", buckets=bounds, registry=registry)
        for value in values:
            histogram.observe(value)
        shown.append([line for line in generate_latest(registry).decode().splitlines() if "_created" not in line])
        assert registry.get_sample_value("seconds_created") > 0
    assert shown[0] == shown[1]


@pytest.mark.parametrize("bounds", [[], [1.0, 1.0], [2.0, 1.0]])
def test_bounds_that_do_not_rise_are_refused(bounds):
    with pytest.raises(ValueError, match="must rise"):
        Tally("seconds", "Some time", buckets=bounds, registry=CollectorRegistry())


@given(st.lists(st.tuples(st.sampled_from(["placed", "late", "busy"]), st.integers(0, 5))), st.booleans())
def test_it_shows_what_a_counter_shows(added, labelled):
    shown = []
    for kind in (Counter, Count):
        registry = CollectorRegistry(auto_describe=True)
        counter = kind("requests_total", "Some requests", ("outcome",) if labelled else (), registry=registry)
        for outcome, by in added:
            if kind is Count:
                counter.inc(*((outcome,) if labelled else ()), by=by)
            else:
                (counter.labels(outcome) if labelled else counter).inc(by)
        shown.append([line for line in generate_latest(registry).decode().splitlines() if "_created" not in line])
    assert shown[0] == shown[1]


def test_a_count_without_its_labels_is_refused():
    with pytest.raises(ValueError, match="has the labels"):
        Count("requests_total", "Some requests", ("outcome",), registry=CollectorRegistry()).inc()
