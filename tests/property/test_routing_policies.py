"""What every routing policy keeps: a pair of one group whose roles fit and that has room, whenever there is one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinyon.core.request import Role
from pinyon.routing.policies import ROUTING_POLICIES
from pinyon.routing.policy import Candidate, serving_groups

CANDIDATES = st.lists(
    st.builds(
        Candidate,
        st.sampled_from("abcdef"),
        st.just("host:1"),
        st.sampled_from(Role),
        st.sampled_from(["one", "two"]),
        reported=st.integers(0, 3),
        max_batch=st.integers(0, 3),
        max_context=st.sampled_from([0, 10, 100]),
    ),
    max_size=6,
    unique_by=lambda candidate: candidate.instance_id,
)
ASKED = st.tuples(
    CANDIDATES, st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 5)), st.sets(st.sampled_from("abcdef"))
)


@pytest.mark.parametrize("name", ROUTING_POLICIES.names)
@given(asked=st.lists(ASKED, max_size=8))
def test_pairs_fit(name: str, asked: list[tuple[list[Candidate], dict[str, int], set[str]]]) -> None:
    policy, again = ROUTING_POLICIES.make(name), ROUTING_POLICIES.make(name)
    for candidates, in_flight, exclude in asked:
        usable = [
            each
            for each in candidates
            if each.instance_id not in exclude and (not each.max_context or each.max_context >= 50)
        ]
        possible = any(
            one.role.prefills and other.role.decodes and one.group == other.group for one in usable for other in usable
        )
        pair = policy.choose(serving_groups(candidates, 50, exclude), in_flight)
        assert (pair is not None) == possible
        if pair is not None:
            assert pair.prefill in usable
            assert pair.decode in usable
            assert pair.prefill.role.prefills
            assert pair.decode.role.decodes
            assert pair.prefill.group == pair.decode.group
        # the same questions in the same order get the same answers, however the list is ordered
        assert again.choose(serving_groups(candidates[::-1], 50, exclude), in_flight) == pair


@pytest.mark.parametrize("name", ROUTING_POLICIES.names)
def test_everyone_gets_work(name: str) -> None:
    policy = ROUTING_POLICIES.make(name)
    fleet = [Candidate(name, f"{name}:1", Role.MIXED, "g") for name in "abcd"]
    in_flight: dict[str, int] = {}
    for _ in range(12):
        pair = policy.choose(serving_groups(fleet, 1), in_flight)
        assert pair is not None
        assert pair.prefill is pair.decode
        in_flight[pair.decode.instance_id] = in_flight.get(pair.decode.instance_id, 0) + 2
    assert set(in_flight.values()) == {6}
