"""The load balancer's counters and histograms, beside those of ``prometheus_client``."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from services.lb.tallies import Tally, TallyByValue

BOUNDS = (0.005, 0.1, 1.0, 300.0)
values = st.one_of(st.sampled_from((*BOUNDS, 0.0, 1e9)), st.floats(0, 1000))
labels = st.tuples(st.sampled_from(("chat", 'a"b\\c\n')), st.sampled_from((200, 503)))


def page(registry: CollectorRegistry) -> set[bytes]:
    """Lines, without the times at which the library's own series began."""
    return {line for line in generate_latest(registry).splitlines() if b"_created" not in line}


@given(st.lists(st.tuples(labels, st.integers(0, 5))))
def test_counters_are_what_the_library_makes_of_the_same(added: list[tuple[tuple[str, int], int]]) -> None:
    registry, expected = CollectorRegistry(auto_describe=True), CollectorRegistry(auto_describe=True)
    ours, plain = Tally(registry, "x_y", "Text", ("a", "b")), Tally(registry, "plain", "Text")
    theirs = Counter("x_y_total", "Text", ("a", "b"), registry=expected)
    total = Counter("plain_total", "Text", registry=expected)
    assert page(registry) == page(expected)
    for names, amount in added:
        ours.add(names, amount)
        plain.add()
        theirs.labels(*map(str, names)).inc(amount)
        total.inc()
    assert page(registry) == page(expected)


@given(st.lists(st.tuples(st.sampled_from(("m", "n")), values)))
def test_histograms_are_what_the_library_makes_of_the_same(added: list[tuple[str, float]]) -> None:
    registry, expected = CollectorRegistry(auto_describe=True), CollectorRegistry(auto_describe=True)
    ours = TallyByValue(registry, "x_seconds", "Text", "model", BOUNDS)
    theirs = Histogram("x_seconds", "Text", ("model",), buckets=BOUNDS, registry=expected)
    ours.show("shown")
    theirs.labels("shown")
    for model, value in added:
        ours.add(model, value)
        theirs.labels(model).observe(value)
    assert page(registry) == page(expected)
