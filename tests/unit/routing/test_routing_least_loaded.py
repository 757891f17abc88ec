"""The policy of a load balancer that has no conductor."""

from __future__ import annotations

from pinyon.core.request import Role
from pinyon.routing.layer import Layer
from pinyon.routing.pair import Pair, PairCandidate, serving_groups
from pinyon.routing.pair import choose_pair as choose
from pinyon.routing.plain import LeastLoadedTarget
from pinyon.routing.pushing import Blind
from pinyon.routing.target import Routed


def choose_pair(fleet, in_flight, total_tokens, exclude=(), avoided=()) -> Pair | None:
    layer = Layer(Blind(), LeastLoadedTarget())
    for each in fleet:
        layer.join(each.instance_id, each.max_batch)
        for _ in range(in_flight.get(each.instance_id, 0)):
            layer.sent(Routed(), each.instance_id)
    return choose(serving_groups(fleet, total_tokens, exclude, avoided), layer, Routed(), 0.0)


def instance(name: str, role: Role = Role.MIXED, group: str = "g", **facts: int) -> PairCandidate:
    return PairCandidate(name, f"{name}:1", role, group, **facts)


def test_a_mixed_instance_keeps_the_request_to_itself():
    pair = choose_pair([instance("b"), instance("a")], {}, 10)
    assert pair is not None
    assert pair.prefill is pair.decode
    assert pair.prefill.instance_id == "a"


def test_roles_are_respected():
    fleet = [instance("d", Role.DECODE), instance("p", Role.PREFILL)]
    pair = choose_pair(fleet, {}, 10)
    assert pair is not None
    assert (pair.prefill.instance_id, pair.decode.instance_id) == ("p", "d")
    assert choose_pair(fleet[:1], {}, 10) is None
    assert choose_pair(fleet[1:], {}, 10) is None


def test_own_requests_count_per_slot():
    fleet = [instance("a", max_batch=2), instance("b", max_batch=8)]
    pair = choose_pair(fleet, {"a": 1, "b": 2}, 10)
    assert pair is not None
    assert pair.decode.instance_id == "b"


def test_who_just_failed_is_chosen_last_but_chosen():
    fleet = [instance("a"), instance("b"), instance("p", Role.PREFILL, "h"), instance("d", Role.DECODE, "h")]
    chosen = []
    for avoided in ((), "a", "ab", "abp", "abpd"):
        pair = choose_pair(fleet, {"b": 9, "p": 10}, 10, (), avoided)
        assert pair is not None
        chosen.append(pair.decode.instance_id)
    assert chosen == ["a", "b", "d", "a", "a"]


def test_kv_never_moves_between_groups():
    fleet = [instance("p", Role.PREFILL, "one"), instance("d", Role.DECODE, "two")]
    assert choose_pair(fleet, {}, 10) is None


def test_excluded_and_too_small_ones_are_left_out():
    fleet = [instance("a", max_context=100), instance("b", max_context=5), instance("c")]
    pair = choose_pair(fleet, {}, 50, {"a"})
    assert pair is not None
    assert pair.decode.instance_id == "c"
    assert choose_pair(fleet, {}, 50, {"a", "c"}) is None
