"""The invariant of every routing policy: a pair of one group whose roles fit, with room where there is any."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinyon.core.request import Role
from pinyon.routing.layer import Layer
from pinyon.routing.pair import PairCandidate, choose_pair, serving_groups
from pinyon.routing.policies import ROUTING_POLICIES
from pinyon.routing.pushing import PUSHING_RULES
from pinyon.routing.routing_keys import byte_keys
from pinyon.routing.target import Report, Routed

CANDIDATES = st.lists(
    st.builds(
        PairCandidate,
        st.sampled_from("abcdef"),
        st.just("host:1"),
        st.sampled_from(Role),
        st.sampled_from(["one", "two"]),
        max_batch=st.integers(0, 3),
        max_context=st.sampled_from([0, 10, 100]),
    ),
    max_size=6,
    unique_by=lambda candidate: candidate.instance_id,
)
REQUESTS = st.builds(
    lambda prompt, user: Routed(byte_keys(b"root", prompt, 1), user),
    st.lists(st.sampled_from(b"xyz"), max_size=4).map(bytes),
    st.sampled_from(["", "u", "v"]),
)
ASKED = st.tuples(CANDIDATES, REQUESTS, st.sets(st.sampled_from("abcdef")), st.sets(st.sampled_from("abcdef")))


def layer_of(policy: str, candidates: list[PairCandidate], pushing: str = "pending") -> Layer:
    layer = Layer(PUSHING_RULES.make(pushing), ROUTING_POLICIES.make(policy))
    for each in candidates:
        layer.join(each.instance_id, each.max_batch)
    return layer


@pytest.mark.parametrize("name", ROUTING_POLICIES.names)
@given(asked=st.lists(ASKED, max_size=8))
def test_pairs_fit(name: str, asked: list[tuple[list[PairCandidate], Routed, set[str], set[str]]]) -> None:
    layers = [layer_of(name, []) for _ in range(2)]
    for now_s, (candidates, request, exclude, full) in enumerate(asked):
        for layer in layers:
            for target in list(layer):
                layer.leave(target.name)
            for each in candidates:
                layer.join(each.instance_id, each.max_batch)
                layer.report(each.instance_id, Report(pending=each.instance_id in full), float(now_s))
        usable = [
            each
            for each in candidates
            if each.instance_id not in exclude and (not each.max_context or each.max_context >= 50)
        ]
        possible = {
            (one.instance_id, other.instance_id)
            for one in usable
            for other in usable
            if one.role.prefills and other.role.decodes and one.group == other.group
        }
        pair = choose_pair(serving_groups(candidates, 50, exclude), layers[0], request, now_s)
        assert (pair is not None) == bool(possible)
        if pair is not None:
            ids = pair.prefill.instance_id, pair.decode.instance_id
            assert ids in possible
            roomy = {each for each in possible if not full.intersection(each)}
            waits = name == "skywalker" and ids[0] == ids[1] and not {ids[0]} - full  # for what was sent there
            assert not roomy or ids in roomy or waits
        # The same requests in the same order get the same answers, whatever the order of the list.
        assert choose_pair(serving_groups(candidates[::-1], 50, exclude), layers[1], request, now_s) == pair
        if pair is not None:
            for layer in layers:
                layer.sent(request, pair.prefill.instance_id)


@pytest.mark.parametrize("name", ["least_loaded", "round_robin", "skywalker"])
def test_everyone_gets_work(name: str) -> None:
    fleet = [PairCandidate(name, f"{name}:1", Role.MIXED, "g") for name in "abcd"]
    layer = layer_of(name, fleet, "blind")
    for _ in range(12):
        pair = choose_pair(serving_groups(fleet, 1), layer, Routed(), 0.0)
        assert pair is not None
        assert pair.prefill is pair.decode
        layer.sent(Routed(), pair.decode.instance_id)
    assert {target.outstanding for target in layer} == {3}


def test_decode_instances_of_a_group_get_work_in_turn() -> None:
    fleet = [
        PairCandidate("p", "p:1", Role.PREFILL, "g"),
        *[PairCandidate(name, "d:1", Role.DECODE, "g") for name in "de"],
    ]
    layer = layer_of("round_robin", fleet, "blind")
    chosen = []
    for _ in range(4):
        pair = choose_pair(serving_groups(fleet, 1), layer, Routed(), 0.0)
        assert pair is not None
        layer.sent(Routed(), pair.prefill.instance_id)
        layer.sent(Routed(), pair.decode.instance_id)
        chosen.append(pair.decode.instance_id)
    assert chosen == ["d", "e", "d", "e"]
