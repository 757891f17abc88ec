"""Links shared by simultaneous transfers: fair by the definition of max-min, and by arithmetic."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinyon_lab.simulator.links import STALE_MAX, Links
from pinyon_lab.simulator.virtual_time import VirtualTime

names = st.sampled_from("abcde")
sends = st.lists(st.tuples(st.floats(0, 10), names, names, st.floats(0, 1000)), min_size=1, max_size=25)


def played(flows: list[tuple[float, str, str, float]]) -> list[float]:
    """Returns the arrival time of each flow."""
    time = VirtualTime()
    links = Links(time, 100.0)
    ends = [-1.0] * len(flows)

    def arrived(number: int) -> None:
        assert ends[number] == -1.0, "twice"
        ends[number] = time.now_s

    for number, (at, source, target, size) in enumerate(flows):
        time.at(at, lambda n=number, s=source, t=target, z=size: links.send(s, t, z, lambda: arrived(n)))  # type: ignore[misc]
    time.run()
    assert not links._flows
    return ends


def test_a_group_of_nodes_has_the_nics_of_all() -> None:
    time, ends = VirtualTime(), dict[str, float]()
    links = Links(time, 100.0, {"a": 2})
    for name in "bc":
        links.send("a", name, 100.0, lambda to=name: ends.update({to: time.now_s}))  # type: ignore[misc]
        links.send(name, "a", 50.0, lambda to=name: ends.update({f"from {to}": time.now_s}))  # type: ignore[misc]
    time.run()
    assert ends == {"b": 1.0, "c": 1.0, "from b": 0.5, "from c": 0.5}


@pytest.mark.parametrize(
    ("flows", "ends"),
    [
        ([(0.0, "a", "b", 100.0)], [1.0]),
        ([(0.0, "a", "b", 100.0), (0.0, "a", "c", 100.0)], [2.0, 2.0]),  # one sender
        ([(0.0, "a", "c", 100.0), (0.0, "b", "c", 100.0)], [2.0, 2.0]),  # one receiver
        ([(0.0, "a", "b", 100.0), (0.0, "b", "a", 100.0)], [1.0, 1.0]),  # both directions at once
        ([(0.0, "a", "b", 100.0), (0.5, "a", "c", 100.0)], [1.5, 2.0]),  # 50, then both 50 each, then 50 alone
        # b's receiver is full with 1/3 each; c gets the rest of a's rate
        (
            [(0.0, "a", "b", 100.0), (0.0, "d", "b", 100.0), (0.0, "e", "b", 100.0), (0.0, "a", "c", 200.0)],
            [3.0, 3.0, 3.0, 3.0],
        ),
        ([(0.0, "a", "b", 0.0)], [0.0]),
    ],
)
def test_shares_by_hand(flows: list[tuple[float, str, str, float]], ends: list[float]) -> None:
    assert played(flows) == pytest.approx(ends)


@given(sends)
def test_all_arrive_and_nobody_sooner_than_alone(flows: list[tuple[float, str, str, float]]) -> None:
    for (at, _, _, size), end in zip(flows, played(flows), strict=True):
        assert end >= at + size / 100 - 1e-6
    last = max(at for at, *_ in flows)
    assert max(played(flows)) <= last + sum(size for *_, size in flows) / 100 + 1e-6, "some link was always busy"


@given(st.lists(st.tuples(names, names), min_size=1, max_size=20))
def test_rates_are_max_min_fair(pairs: list[tuple[str, str]]) -> None:
    """Each end keeps within its rate, and each flow has a full end at which no other flow is faster."""
    time = VirtualTime()
    links = Links(time, 100.0)
    for source, target in pairs:
        links.send(source, target, 1e6, lambda: None)
    rates = [flow.rate for flow in links._flows]
    ends = [(("out", source), ("in", target)) for source, target in pairs]
    total: dict[tuple[str, str], float] = {}
    for both, rate in zip(ends, rates, strict=True):
        for end in both:
            total[end] = total.get(end, 0.0) + rate
    assert max(total.values()) <= 100 * (1 + 1e-9)
    for both, rate in zip(ends, rates, strict=True):
        assert any(
            total[end] >= 100 * (1 - 1e-9)
            and all(other <= rate * (1 + 1e-9) for theirs, other in zip(ends, rates, strict=True) if end in theirs)
            for end in both
        )


def test_times_that_have_changed_are_not_kept() -> None:
    time = VirtualTime()
    links = Links(time, 100.0)
    for _ in range(100):
        links.send("a", "b", 1e6, lambda: None)
    assert len(links._soonest) <= STALE_MAX + 4 * 100 + 100
    time.run()
    assert not links._flows
    assert time.now_s == pytest.approx(1e6)
