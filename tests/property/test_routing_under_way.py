"""The requests that another load balancer had not received at its last report, against a list of all sent."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from pinyon.routing import under_way
from pinyon.routing.under_way import UnderWay

NAMES, MODELS = ("eu", "ap"), ("a", "b", "c")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("sent"), st.sampled_from(NAMES), st.sampled_from(MODELS)),
        st.tuples(st.just("told"), st.sampled_from(NAMES), st.integers(0, 12)),
        st.tuples(st.just("forget"), st.sampled_from(NAMES), st.none()),
    ),
    max_size=60,
)


@given(STEPS)
def test_what_has_not_arrived_is_under_way(steps) -> None:
    ways = UnderWay()
    sent: dict[str, list[str]] = {name: [] for name in NAMES}
    told = dict.fromkeys(NAMES, 0)
    for what, name, value in steps:
        if what == "sent":
            ways.sent(name, value)
            sent[name].append(value)
        elif what == "forget":
            ways.forget(name)
            sent[name], told[name] = [], 0
        else:
            # Messages may be late; a report never counts more than were sent.
            told[name] = max(told[name], min(value, len(sent[name])))
            assert +Counter(ways.told(name, min(value, len(sent[name])))) == Counter(sent[name][told[name] :])


def test_one_that_never_counts_costs_no_memory(monkeypatch) -> None:
    monkeypatch.setattr(under_way, "KEPT_MAX", 5)
    ways = UnderWay()
    for each in range(100):
        ways.sent("eu", f"m{each}")
    assert ways.told("eu", 0) == {f"m{each}": 1 for each in range(95, 100)}
    assert ways.told("eu", 98) == {"m98": 1, "m99": 1}
