"""Everyone in turn."""

from __future__ import annotations

from pinyon.core.request import Role
from pinyon.routing import round_robin
from pinyon.routing.policy import Candidate, serving_groups
from pinyon.routing.round_robin import RoundRobin


def fleet(**roles: Role) -> list[Candidate]:
    return [Candidate(name, f"{name}:1", role, "g") for name, role in roles.items()]


def turns(policy: RoundRobin, candidates: list[Candidate], count: int, exclude: tuple[str, ...] = ()) -> list[str]:
    chosen = []
    for _ in range(count):
        pair = policy.choose(serving_groups(candidates, 1, exclude), {})
        assert pair is not None
        chosen.append(pair.prefill.instance_id + pair.decode.instance_id)
    return chosen


def test_mixed_instances_take_turns_and_no_kv_moves() -> None:
    assert turns(RoundRobin(), fleet(c=Role.MIXED, a=Role.MIXED, b=Role.MIXED), 5) == ["aa", "bb", "cc", "aa", "bb"]


def test_roles_take_turns_apart() -> None:
    candidates = fleet(p=Role.PREFILL, q=Role.PREFILL, d=Role.DECODE, e=Role.DECODE, f=Role.DECODE)
    assert turns(RoundRobin(), candidates, 6) == ["pd", "qe", "pf", "qd", "pe", "qf"]


def test_who_comes_is_next_and_who_goes_is_left_out() -> None:
    policy = RoundRobin()
    assert turns(policy, fleet(a=Role.MIXED, b=Role.MIXED), 3) == ["aa", "bb", "aa"]
    larger = fleet(a=Role.MIXED, b=Role.MIXED, z=Role.MIXED)
    assert turns(policy, larger, 1) == ["zz"]
    assert turns(policy, larger, 3, exclude=("b",)) == ["aa", "zz", "aa"]
    assert turns(policy, larger, 2) == ["bb", "zz"]


def test_kv_never_moves_between_groups() -> None:
    candidates = [
        Candidate("p", "p:1", Role.PREFILL, "one"),
        Candidate("d", "d:1", Role.DECODE, "one"),
        Candidate("m", "m:1", Role.MIXED, "two"),
    ]
    assert turns(RoundRobin(), candidates, 4) == ["pd", "mm", "pd", "mm"]
    assert RoundRobin().choose(serving_groups(candidates[:1], 1), {}) is None


def test_instances_of_long_ago_are_forgotten(monkeypatch) -> None:
    monkeypatch.setattr(round_robin, "REMEMBERED_MAX", 4)
    policy = RoundRobin()
    for number in range(20):
        turns(policy, fleet(**{f"i{number}": Role.MIXED}), 1)
    assert [len(each) for each in policy._turns] == [4, 4]
