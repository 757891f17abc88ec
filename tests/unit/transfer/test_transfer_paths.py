"""Candidate paths: tiers, rails, routed fabrics, hosts that publish little."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinyon.transfer.paths.reach import MAX_TIER_PATHS, Reach
from pinyon.transfer.types.limits import TransferLimits
from pinyon.transfer.types.nic import Nic, Path, Tiers
from pinyon.transfer.types.segment import MAX_NICS, SegmentDescriptor
from pinyon.transfer.types.topology import Topology


class End(NamedTuple):
    """One side of a transfer."""

    nics: tuple[Nic, ...]
    topology: Topology | None = None
    location: str = "cpu:0"


def candidate_paths(
    local: End, remote: End, order: tuple[str, ...], *, same_process: bool = False, shm: bool = False
) -> Tiers:
    reach = Reach(order, local.nics, local.topology, bytes(16), "this host", TransferLimits(), 8)
    boot_id = bytes(16) if same_process else b"p" * 16
    host = ("@peer", "this host") if shm else ("", "")
    segment = SegmentDescriptor("10.0.0.1", 7000, boot_id, (), remote.nics, remote.topology, *host)
    return reach.tiers(segment, local.location, remote.location)


def tcp(name: str, network: int | str = "") -> Nic:
    """Returns a NIC; with ``network`` n it is on 10.0.n.0/24."""
    return Nic(name, "tcp", f"10.0.{network or 0}.1", 7000, f"10.0.{network}.0/24" if network != "" else "")


def rdma(name: str) -> Nic:
    return Nic(name, "rdma", "0000:0000:0000:0000:0000:ffff:0a00:0105", 1)


def pairs(tier: tuple[Path, ...]) -> list[str]:
    return [f"{path.local_nic}-{path.remote_nic}" for path in tier]


def host(count: int, prefix: str, *, rails: bool) -> tuple[Nic, ...]:
    return tuple(tcp(f"{prefix}{i}", i + 1 if rails else "") for i in range(count))


def test_one_path_each_where_no_nic_is_involved() -> None:
    nobody = End(())
    everything = ("local", "shm", "rdma", "tcp")
    shm_tier, tcp_tier = (Path("shm", "", ""),), (Path("tcp", "", ""),)
    assert candidate_paths(nobody, nobody, everything) == (tcp_tier,)
    assert candidate_paths(nobody, nobody, everything, shm=True) == (shm_tier, tcp_tier)
    assert candidate_paths(nobody, nobody, ("tcp", "shm"), shm=True) == (tcp_tier, shm_tier)
    assert candidate_paths(nobody, nobody, ("tcp", "shm"), shm=True, same_process=True) == (tcp_tier,)
    assert candidate_paths(nobody, nobody, ("local",), same_process=True) == ((Path("local", "", ""),),)
    assert candidate_paths(nobody, nobody, ("rdma", "local", "shm")) == ()


def test_a_host_without_nics_has_one_unnamed_tcp_address() -> None:
    (tier,) = candidate_paths(End(()), End(host(3, "r", rails=True)), ("rdma", "tcp"))
    assert pairs(tier) == ["-r0", "-r1", "-r2"]
    (tier,) = candidate_paths(End(host(2, "l", rails=True)), End(()), ("rdma", "tcp"))
    assert pairs(tier) == ["l0-", "l1-"]


def test_rails_pair_nics_of_one_network_only() -> None:
    (tier,) = candidate_paths(End(host(4, "l", rails=True)), End(host(4, "r", rails=True)[::-1]), ("tcp",))
    assert sorted(pairs(tier)) == ["l0-r0", "l1-r1", "l2-r2", "l3-r3"]
    assert candidate_paths(End((tcp("l", 1),)), End((tcp("x", 2), tcp("r", 1))), ("tcp",)) == (
        (Path("tcp", "l", "r"),),
    )


def test_without_a_common_network_a_router_is_assumed() -> None:
    (tier,) = candidate_paths(End((tcp("l0", 1), tcp("l1", 2))), End((tcp("r0", 3), tcp("r1", 4))), ("tcp",))
    assert pairs(tier) == ["l0-r0", "l1-r1", "l0-r1", "l1-r0"]


def test_a_nic_of_an_unknown_network_may_pair_with_any() -> None:
    (tier,) = candidate_paths(End((tcp("l0", 1), tcp("l1"))), End((tcp("r0", 1), tcp("r1", 2))), ("tcp",))
    assert pairs(tier) == ["l0-r0", "l1-r1", "l1-r0"]


def test_ipv4_does_not_reach_ipv6() -> None:
    six = Nic("r6", "tcp", "fd00::1", 7000, "fd00::/64")
    assert candidate_paths(End((tcp("l", 1),)), End((six,)), ("tcp",)) == ((Path("tcp", "", ""),),)
    assert candidate_paths(End((tcp("l", 1),)), End((six, tcp("r", 2))), ("tcp",)) == ((Path("tcp", "l", "r"),),)


def test_preferred_nics_come_first_then_pairs_with_a_secondary() -> None:
    local = End(host(2, "l", rails=False), Topology({"cpu:0": (("l0",), ("l1",)), "cpu:1": (("l1",), ("l0",))}))
    remote = End(host(2, "r", rails=False), Topology({"cuda:1": (("r1",), ("r0",))}), "cuda:1")
    first, second = candidate_paths(local, remote, ("tcp",))
    assert pairs(first) == ["l0-r1"]
    assert sorted(pairs(second)) == ["l0-r0", "l1-r0", "l1-r1"]
    first, _ = candidate_paths(local._replace(location="cpu:1"), remote, ("tcp",))
    assert pairs(first) == ["l1-r1"]


def test_rails_leave_no_empty_tier() -> None:
    """The preferred NICs are on different rails: only a secondary one connects."""
    local = End(host(2, "l", rails=True), Topology({"cpu:0": (("l0",), ("l1",))}))
    remote = End(host(2, "r", rails=True), Topology({"cpu:0": (("r1",), ("r0",))}))
    (tier,) = candidate_paths(local, remote, ("tcp",))
    assert sorted(pairs(tier)) == ["l0-r0", "l1-r1"]


def test_nics_outside_the_topology_are_used_only_if_it_has_none() -> None:
    local = End(host(3, "l", rails=False), Topology({"cpu:0": (("l2", "gone"), ())}))
    assert pairs(candidate_paths(local, End(()), ("tcp",))[0]) == ["l2-"]
    of_rdma_only = End(host(2, "l", rails=False), Topology({"cpu:0": (("mlx5_0",), ())}))
    assert pairs(candidate_paths(of_rdma_only, End(()), ("tcp",))[0]) == ["l0-", "l1-"]
    secondary_only = End(host(2, "l", rails=False), Topology({"cpu:0": ((), ("l1",))}))
    assert pairs(candidate_paths(secondary_only, End(()), ("tcp",))[0]) == ["l1-"]
    remote = End(host(2, "r", rails=False), Topology({"cpu:0": (("r0",), ("r1",))}))
    assert [pairs(tier) for tier in candidate_paths(secondary_only, remote, ("tcp",))] == [["l1-r0"], ["l1-r1"]]


@pytest.mark.parametrize("order", [("rdma", "tcp"), ("tcp", "rdma")])
def test_transports_come_in_the_given_order(order: tuple[str, ...]) -> None:
    local = End((tcp("eth0"), rdma("mlx5_0"), tcp("eth0")))
    remote = End((rdma("mlx5_1"), tcp("eth1")))
    tiers = candidate_paths(local, remote, order)
    assert tuple(tier[0].transport for tier in tiers) == order
    assert {pair for tier in tiers for pair in pairs(tier)} == {"eth0-eth1", "mlx5_0-mlx5_1"}


nics = st.lists(st.tuples(st.sampled_from(["tcp", "rdma"]), st.sampled_from(["", 1, 2, 3])), max_size=12)
splits = st.none() | st.tuples(st.integers(0, 12), st.integers(0, 12))


def drawn_end(prefix: str, drawn: list[tuple[str, int | str]], split: tuple[int, int] | None) -> End:
    named = tuple(
        tcp(f"{prefix}{i}", network) if transport == "tcp" else rdma(f"{prefix}{i}")
        for i, (transport, network) in enumerate(drawn)
    )
    if split is None:
        return End(named)
    names = [nic.name for nic in named]
    cut, end = min(split), max(split)
    return End(named, Topology({"cpu:0": (tuple(names[:cut]), tuple(names[cut:end]))}))


@given(ours=nics, theirs=nics, our_split=splits, their_split=splits, shm=st.booleans(), same=st.booleans())
def test_tiers_are_well_formed(ours, theirs, our_split, their_split, shm, same) -> None:
    local, remote = drawn_end("l", ours, our_split), drawn_end("r", theirs, their_split)
    order = ("local", "shm", "rdma", "tcp")
    tiers = candidate_paths(local, remote, order, same_process=same, shm=shm)
    flat = [path for tier in tiers for path in tier]
    assert len(set(flat)) == len(flat)
    assert all(0 < len(tier) <= MAX_TIER_PATHS for tier in tiers)
    assert all(len({path.transport for path in tier}) == 1 for tier in tiers)
    ranks = [order.index(tier[0].transport) for tier in tiers]
    assert ranks == sorted(ranks)
    assert all(ranks.count(rank) <= (1, 1, 2, 2)[rank] for rank in ranks)
    assert any(path.transport == "tcp" for path in flat)  # there is always a tcp address
    kinds = {nic.name: nic.transport for nic in (*local.nics, *remote.nics)}
    assert all(kinds.get(name, path.transport) == path.transport for path in flat for name in path[1:])


@given(here=st.integers(1, 80), there=st.integers(1, MAX_NICS))
def test_paths_alternate_between_the_nics_here_and_use_all(here: int, there: int) -> None:
    (tier,) = candidate_paths(End(host(here, "l", rails=False)), End(host(there, "r", rails=False)), ("tcp",))
    assert len(tier) == min(here * there, MAX_TIER_PATHS)
    assert pairs(tier)[:here] == [f"l{i}-r{i % there}" for i in range(min(here, MAX_TIER_PATHS))]
    if here > 1:
        assert all(one.local_nic != two.local_nic for one, two in pairwise(tier))
    per_nic = [sum(path.local_nic == f"l{i}" for path in tier) for i in range(here)]
    assert max(per_nic) - min(per_nic) <= 1


@pytest.mark.parametrize(("cores", "here"), [(1, 2), (4, 2), (6, 3), (64, 4)])
def test_connections_within_a_host_are_bounded_by_its_cores(cores: int, here: int) -> None:
    reach = Reach(("tcp",), (), None, b"a" * 16, "this host", TransferLimits(connections_per_peer=4), cores)
    path = Path("tcp", "", "")
    near = SegmentDescriptor("10.0.0.1", 7000, b"b" * 16, host_id="this host")
    assert reach.room(path, 1, near) == here
    assert reach.room(path, 1, SegmentDescriptor("10.0.0.2", 7000, b"b" * 16, host_id="another")) == 4
