"""The topology matrix and the values around it: NICs, inventories, GIDs."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from pinyon.transfer import InvalidTransfer
from pinyon.transfer.types.inventory import (
    Distance,
    Gid,
    GpuInfo,
    Inventory,
    NicInfo,
    NumaNode,
    choose_gid,
    pci_distance,
    usable_nics,
)
from pinyon.transfer.types.nic import Nic, check_nic, same_network
from pinyon.transfer.types.topology import Topology, build_topology

ETH = Nic("eth0", "tcp", "10.0.1.5", 7000, "10.0.1.0/24")
HCA = Nic("mlx5_0", "rdma", "0000:0000:0000:0000:0000:ffff:0a00:0105", 1)
TOPOLOGY = Topology({"cpu:0": (("a", "b"), ("c",)), "cpu:1": (("c",), ("b", "a")), "cuda:0": ((), ("d",))})

# ---------------------------------------------------------------- what is published of a NIC


@pytest.mark.parametrize("nic", [ETH, HCA, Nic("e", "tcp", "2001:db8::1", 65535), ETH._replace(name="ens1f0np0.100@x")])
def test_good_nics_are_taken(nic: Nic) -> None:
    assert check_nic(nic) is nic


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", ""),
        ("name", "x" * 65),
        ("name", "a b"),
        ("name", "../b"),
        ("name", ".."),
        ("name", "a\n"),
        ("name", 7),
        ("transport", "shm"),
        ("transport", None),
        ("transport", []),
        ("address", ""),
        ("address", "host.example"),
        ("address", "fe80::1%eth0"),
        ("address", "1" * 65),
        ("address", 167772165),
        ("port", 0),
        ("port", 65536),
        ("port", True),
        ("port", "7000"),
        ("network", "10.0.1.5/24"),
        ("network", "10.0.1.0/99"),
        ("network", "x" * 65),
        ("network", None),
        ("network", 10),
    ],
)
def test_bad_nics_are_refused_by_field(field: str, value: Any) -> None:
    with pytest.raises(InvalidTransfer) as caught:
        check_nic(ETH._replace(**{field: value}))
    assert caught.value.field == f"nic.{field}"


@pytest.mark.parametrize("change", [{"address": "10.0.1.5"}, {"port": 255}, {"port": 0}])
def test_an_rdma_nic_has_a_gid_and_a_device_port(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidTransfer):
        check_nic(HCA._replace(**change))


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ("10.0.1.0/24", "10.0.1.0/24", True),
        ("10.0.1.0/24", "10.0.2.0/24", False),
        ("10.0.0.0/16", "10.0.2.0/24", True),  # prefixes are set by hand and may differ
        ("10.0.1.0/24", "2001:db8::/64", False),
        ("2001:db8::/64", "2001:0db8:0::/64", True),
        ("10.0.1.0/24", "", None),
        ("", "", None),
        ("10.0.1.0/24", "nonsense", None),
    ],
)
def test_same_network(ours: str, theirs: str, expected: bool | None) -> None:
    a, b = ETH._replace(network=ours), HCA._replace(network=theirs)
    assert same_network(a, b) is expected
    assert same_network(b, a) is expected


# ---------------------------------------------------------------- the matrix


def test_locations_choose_their_nics() -> None:
    assert TOPOLOGY.preferred("cpu:0") == ("a", "b")
    assert TOPOLOGY.secondary("cpu:0") == ("c",)
    assert TOPOLOGY.preferred("cuda:0") == ()
    assert TOPOLOGY.secondary("cuda:0") == ("d",)
    assert TOPOLOGY.nics == ("a", "b", "c", "d")


def test_an_unknown_location_has_the_wildcards_row_else_all_nics() -> None:
    assert TOPOLOGY.preferred("npu:0") == ("a", "b", "c", "d")
    assert TOPOLOGY.secondary("npu:0") == ()
    wild = Topology({**TOPOLOGY.rows, "*": (("b",), ("a",))})
    assert wild.preferred("npu:0") == ("b",)
    assert wild.secondary("npu:0") == ("a",)
    assert Topology({}).preferred("cpu:0") == ()


def test_restricted_keeps_order_and_rows() -> None:
    assert TOPOLOGY.restricted({"a", "c", "z"}).to_dict() == {
        "cpu:0": [["a"], ["c"]],
        "cpu:1": [["c"], ["a"]],
        "cuda:0": [[], []],
    }


def test_mooncakes_json_form() -> None:
    text = '{"cpu:0": [["mlx5_2"], ["mlx5_3"]]}'
    topology = Topology.from_json(text)
    assert topology.preferred("cpu:0") == ("mlx5_2",)
    assert topology.secondary("cpu:0") == ("mlx5_3",)
    assert topology.to_json() == text
    assert Topology.from_json(TOPOLOGY.to_json()) == TOPOLOGY


def test_a_topology_is_a_value() -> None:
    rows = {"cpu:0": (("a",), ("b",))}
    topology = Topology(rows)
    rows["cpu:1"] = (("c",), ())
    assert topology == Topology({"cpu:0": (("a",), ("b",))})
    assert hash(topology) == hash(Topology({"cpu:0": (("a",), ("b",))}))
    assert pickle.loads(pickle.dumps(topology)) == topology
    assert topology != TOPOLOGY


@pytest.mark.parametrize(
    "row",
    [
        [],
        [["a"]],
        [["a"], ["b"], ["c"]],
        "ab",
        [["a"], "b"],
        {"preferred": ["a"]},
        [["a"], ["a"]],
        [["a", "a"], []],
        [[""], []],
        [["a b"], []],
        [["a/b"], []],
        [["a" * 65], []],
        [[7], []],
        [[["a"]], []],
        [[f"n{index}" for index in range(40)], [f"m{index}" for index in range(25)]],
    ],
)
def test_a_bad_row_is_refused_by_location(row: Any) -> None:
    with pytest.raises(InvalidTransfer, match="'cuda:7'"):
        Topology.from_dict({"cpu:0": [["a"], []], "cuda:7": row})


@pytest.mark.parametrize("location", ["", "x" * 65, "cpu 0", "cpu:0\n", 7])
def test_a_bad_location_is_refused(location: Any) -> None:
    with pytest.raises(InvalidTransfer, match="location has 1 to 64"):
        Topology.from_dict({location: [["a"], []]})


def test_bounds_of_a_topology() -> None:
    Topology({f"cpu:{index}": (("a",), ()) for index in range(1024)})
    Topology({"cpu:0": (tuple(f"n{index}" for index in range(64)), ())})
    for value in ({f"cpu:{index}": [["a"], []] for index in range(1025)}, None, [], "cpu:0", 7):
        with pytest.raises(InvalidTransfer):
            Topology.from_dict(value)


@pytest.mark.parametrize("text", ["", "{", "null", "[" * 100_000, "9" * 5000, '{"cpu:0": [[], []]}' + " " * (1 << 23)])
def test_bad_json_is_refused(text: str) -> None:
    with pytest.raises(InvalidTransfer):
        Topology.from_json(text)


# ---------------------------------------------------------------- from inventory to matrix


def nic(name: str, pci: str = "", numa: int | None = None, kind: str = "rdma", **more: Any) -> NicInfo:
    return NicInfo(name, kind, tuple(pci.split("/")) if pci else (), numa, **more)


def gpu(pci: str, numa: int | None = None, index: int = 0) -> GpuInfo:
    return GpuInfo(index, tuple(pci.split("/")), numa)


@pytest.mark.parametrize(
    ("pci", "numa", "expected"),
    [
        ("pci0:0/0:01.0/1:00.0/2:00.0/4:00.0", 0, (Distance.SWITCH, 4)),  # the switch's other port
        ("pci0:0/0:01.0/1:00.0/2:01.0/5:00.0/6:00.0/7:00.0", 0, (Distance.SWITCH, 6)),  # a second switch below
        ("pci0:0/0:01.0/1:00.1", 0, (Distance.SWITCH, 4)),  # beside the switch, on its root port
        ("pci0:0/0:02.0/9:00.0", 0, (Distance.HOST_BRIDGE, 0)),
        ("pci0:40/40:01.0/41:00.0", 0, (Distance.NODE, 0)),
        ("pci0:40/40:01.0/41:00.0", None, (Distance.NODE, 0)),
        ("pci0:80/80:01.0/81:00.0", 1, (Distance.SYSTEM, 0)),
        ("", None, (Distance.NODE, 0)),
    ],
)
def test_distance(pci: str, numa: int | None, expected: tuple[Distance, int]) -> None:
    assert pci_distance(gpu("pci0:0/0:01.0/1:00.0/2:08.0/3:00.0", 0), nic("n", pci, numa)) == expected


def test_distance_without_a_known_node() -> None:
    far = nic("n", "pci0:80/80:01.0/81:00.0", 1)
    assert pci_distance(gpu("pci0:0/0:01.0/1:00.0"), far) == (Distance.NODE, 0)


def test_a_gpu_prefers_the_shortest_path_not_just_its_switch() -> None:
    inventory = Inventory(
        gpus=(gpu("b/r/s/d0/g"),),
        nics=(
            nic("deep", "b/r/s/d2/t/u/n"),
            nic("near", "b/r/s/d1/n"),
            nic("near2", "b/r/s/d3/n"),
            nic("far", "b/q/n"),
        ),
    )
    assert build_topology(inventory).to_dict() == {"cuda:0": [["near", "near2"], ["deep", "far"]]}


def test_without_a_nic_at_its_switch_a_gpu_uses_bridge_then_node() -> None:
    bridge, node, other = nic("bridge", "b/q/n", 0), nic("node", "c/q/n", 0), nic("other", "d/q/n", 1)
    near = gpu("b/r/g", 0)
    for nics, preferred in (
        ((other, node, bridge), ["bridge"]),
        ((other, node), ["node"]),
        ((other,), ["other"]),
        ((), []),
    ):
        assert build_topology(Inventory(gpus=(near,), nics=nics)).to_dict()["cuda:0"][0] == preferred


def test_a_node_without_nics_prefers_all() -> None:
    inventory = Inventory((NumaNode(0, (0,)), NumaNode(1, (1,))), (nic("a", numa=1), nic("b", numa=1)))
    assert build_topology(inventory).to_dict() == {"cpu:0": [["a", "b"], []], "cpu:1": [["a", "b"], []]}


def test_a_nic_of_unknown_node_is_near_to_all() -> None:
    inventory = Inventory((NumaNode(0, (0,)), NumaNode(1, (1,))), (nic("a", numa=1), nic("b")))
    assert build_topology(inventory).to_dict() == {"cpu:0": [["b"], ["a"]], "cpu:1": [["a", "b"], []]}


def test_nics_that_are_down_are_secondary() -> None:
    inventory = Inventory((NumaNode(0, (0,)),), (nic("a", numa=0, up=False), nic("b", numa=1)), (gpu("b/r/g", 0),))
    assert build_topology(inventory).to_dict() == {"cpu:0": [["b"], ["a"]], "cuda:0": [["b"], ["a"]]}
    dark = Inventory((NumaNode(0, (0,)),), (nic("a", up=False),), (gpu("b/r/g", 0),))
    assert build_topology(dark).to_dict() == {"cpu:0": [[], ["a"]], "cuda:0": [[], ["a"]]}


def test_two_transports_in_one_matrix() -> None:
    nodes = NumaNode(0, (0,)), NumaNode(1, (1,))
    tcp = [NicInfo(f"e{numa}", "tcp", numa=numa, addresses=("10.0.0.1/24",)) for numa in range(2)]
    both = build_topology(Inventory(nodes, (nic("m0", numa=0), nic("m1", numa=1), *tcp)), "all")
    assert both.to_dict() == {"cpu:0": [["m0", "e0"], ["m1", "e1"]], "cpu:1": [["m1", "e1"], ["m0", "e0"]]}
    assert both.restricted({"m0", "m1"}).preferred("cpu:0") == ("m0",)


def test_of_too_many_nics_the_nearest_are_kept() -> None:
    far = [nic(f"far{index}", numa=1) for index in range(60)]
    near = [nic(f"near{index}", numa=0) for index in range(10)]
    inventory = Inventory((NumaNode(0, (0,)), NumaNode(1, (1,)), NumaNode(2, (2,))), (*far, *near))
    topology = build_topology(inventory)
    assert topology.preferred("cpu:0") == tuple(info.name for info in near)
    assert len(topology.secondary("cpu:0")) == 54
    assert len(topology.preferred("cpu:2")) == 64


def test_which_interfaces_tcp_uses() -> None:
    def tcp(name: str, addresses: tuple[str, ...] | None = ("10.0.0.1/24",), **more: bool) -> NicInfo:
        return NicInfo(name, "tcp", addresses=addresses, **more)

    lo, veth, empty = tcp("lo", loopback=True, virtual=True), tcp("veth0", virtual=True), tcp("empty", ())
    part = tcp("part", None, enslaved=True)
    vrf = tcp("vrf", enslaved=True)  # in a VRF an interface keeps its addresses
    eth = tcp("eth0")
    rdma = nic("mlx5_0", virtual=True)

    def names(*nics: NicInfo, named: tuple[str, ...] = ()) -> list[str]:
        return [info.name for info in usable_nics(Inventory(nics=nics), "tcp", named)]

    assert names(lo, veth, empty, part, vrf, eth, rdma) == ["vrf", "eth0"]
    assert names(lo, veth, empty) == ["veth0"]
    assert names(lo) == []
    assert names(lo, veth, eth, named=("veth0", "lo", "none")) == ["lo", "veth0"]
    assert usable_nics(Inventory(nics=(lo, rdma)), "rdma") == (rdma,)


def test_another_kind_of_nic_is_refused() -> None:
    with pytest.raises(InvalidTransfer, match="shm"):
        build_topology(Inventory(), "shm")


# ---------------------------------------------------------------- RoCE GIDs

V1, V2 = "IB/RoCE v1", "RoCE v2"
MAPPED, GLOBAL, LOCAL = "::ffff:10.0.1.5", "2001:db8::5", "fe80::5"


@pytest.mark.parametrize(
    ("gids", "chosen"),
    [
        ([(V1, LOCAL), (V2, LOCAL), (V1, MAPPED), (V2, MAPPED), (V2, GLOBAL)], 3),
        ([(V1, LOCAL), (V2, LOCAL), (V1, GLOBAL), (V2, GLOBAL)], 3),
        ([(V1, LOCAL), (V2, LOCAL)], 1),
        ([(V1, LOCAL), (V1, MAPPED)], 0),
        ([(V2, MAPPED), (V2, "::ffff:10.0.2.5")], 0),
        ([(V2, "::"), (V2, LOCAL)], 1),
        ([(V2, "nonsense"), (V1, LOCAL)], 1),
        ([(V2, "::")], None),
        ([], None),
    ],
)
def test_gid_choice(gids: list[tuple[str, str]], chosen: int | None) -> None:
    table = [Gid(index, kind, text) for index, (kind, text) in enumerate(gids)]
    for order in (table, table[::-1]):
        gid = choose_gid(order)
        assert (None if gid is None else gid.index) == chosen
