"""Discovery on fake sysfs trees: the devices found and the resulting matrices, written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from pinyon.cli import main
from pinyon.transfer import InvalidTransfer
from pinyon.transfer.host.discovery import (
    TOPOLOGY_ENV,
    configured_topology,
    discover,
    load_topology,
    rdma_nics,
    tcp_nics,
)
from pinyon.transfer.host.interfaces import Interface
from pinyon.transfer.types.inventory import Gid, GpuInfo, Inventory, NicInfo, NumaNode
from pinyon.transfer.types.nic import Nic, check_nic
from pinyon.transfer.types.topology import Topology, build_topology
from tests.unit.transfer.sysfs_trees import (
    ZERO_GID,
    SysfsTree,
    dgx_like,
    hgx_like,
    ipv4_gid,
    laptop,
    link_local_gid,
    two_socket,
)


def matrix(tree: SysfsTree, kind: str = "rdma") -> dict[str, list[list[str]]]:
    return build_topology(discover(tree.root), kind).to_dict()


def mlx5(*indexes: int) -> list[str]:
    return [f"mlx5_{index}" for index in indexes]


def ens(*indexes: int) -> list[str]:
    return [f"ens{index}" for index in indexes]


def nic(inventory: Inventory, name: str) -> NicInfo:
    return next(info for info in inventory.nics if info.name == name)


# ---------------------------------------------------------------- machines


def test_dgx_gpus_prefer_nics_of_their_switch_sockets_their_own(tmp_path: Path) -> None:
    assert matrix(dgx_like(tmp_path)) == {
        "cpu:0": [mlx5(0, 1, 2, 3, 4), mlx5(5, 6, 7, 8, 9)],
        "cpu:1": [mlx5(5, 6, 7, 8, 9), mlx5(0, 1, 2, 3, 4)],
        "cuda:0": [mlx5(0, 1), mlx5(2, 3, 4, 5, 6, 7, 8, 9)],
        "cuda:1": [mlx5(0, 1), mlx5(2, 3, 4, 5, 6, 7, 8, 9)],
        "cuda:2": [mlx5(2, 3), mlx5(0, 1, 4, 5, 6, 7, 8, 9)],
        "cuda:3": [mlx5(2, 3), mlx5(0, 1, 4, 5, 6, 7, 8, 9)],
        "cuda:4": [mlx5(5, 6), mlx5(0, 1, 2, 3, 4, 7, 8, 9)],
        "cuda:5": [mlx5(5, 6), mlx5(0, 1, 2, 3, 4, 7, 8, 9)],
        "cuda:6": [mlx5(7, 8), mlx5(0, 1, 2, 3, 4, 5, 6, 9)],
        "cuda:7": [mlx5(7, 8), mlx5(0, 1, 2, 3, 4, 5, 6, 9)],
    }


def test_dgx_over_tcp_has_equal_places_and_no_container_bridge(tmp_path: Path) -> None:
    rows = matrix(dgx_like(tmp_path), "tcp")
    assert rows["cpu:1"] == [ens(5, 6, 7, 8, 9), ens(0, 1, 2, 3, 4)]
    assert rows["cuda:6"] == [ens(7, 8), ens(0, 1, 2, 3, 4, 5, 6, 9)]


def test_dgx_inventory(tmp_path: Path) -> None:
    inventory = discover(dgx_like(tmp_path).root)
    assert inventory.nodes == (
        NumaNode(0, (*range(64), *range(128, 192))),
        NumaNode(1, (*range(64, 128), *range(192, 256))),
    )
    assert inventory.gpus[0] == GpuInfo(
        0, ("pci0000:00", "0000:00:01.1", "0000:01:00.0", "0000:02:00.0", "0000:03:00.0"), 0
    )
    assert [gpu.numa for gpu in inventory.gpus] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert nic(inventory, "mlx5_9") == NicInfo(
        "mlx5_9",
        "rdma",
        pci=("pci0000:a0", "0000:a0:03.1", "0000:a1:00.0"),
        numa=1,
        speed_mbit=200_000,
        up=True,
        gids=(
            Gid(0, "IB/RoCE v1", link_local_gid(9), "ens9"),
            Gid(1, "RoCE v2", link_local_gid(9), "ens9"),
            Gid(2, "IB/RoCE v1", ipv4_gid("10.9.1.1"), "ens9"),
            Gid(3, "RoCE v2", ipv4_gid("10.9.1.1"), "ens9"),
        ),
    )
    assert nic(inventory, "ens9") == NicInfo(
        "ens9", "tcp", pci=("pci0000:a0", "0000:a0:03.1", "0000:a1:00.0"), numa=1, speed_mbit=200_000, up=True
    )
    assert nic(inventory, "lo").loopback
    assert nic(inventory, "docker0").virtual


def test_hgx_with_a_nic_per_gpu(tmp_path: Path) -> None:
    rows = matrix(hgx_like(tmp_path, nics=8))
    assert rows["cpu:0"] == [mlx5(0, 1, 2, 3), mlx5(4, 5, 6, 7)]
    assert rows["cpu:1"] == [mlx5(4, 5, 6, 7), mlx5(0, 1, 2, 3)]
    assert [rows[f"cuda:{gpu}"][0] for gpu in range(8)] == [mlx5(gpu) for gpu in range(8)]
    assert rows["cuda:3"][1] == mlx5(0, 1, 2, 4, 5, 6, 7)
    assert len(rows) == 10


def test_hgx_with_a_nic_per_pair_of_gpus(tmp_path: Path) -> None:
    assert matrix(hgx_like(tmp_path, nics=4)) == {
        "cpu:0": [mlx5(0, 1), mlx5(2, 3)],
        "cpu:1": [mlx5(2, 3), mlx5(0, 1)],
        "cuda:0": [mlx5(0), mlx5(1, 2, 3)],
        "cuda:1": [mlx5(0), mlx5(1, 2, 3)],
        "cuda:2": [mlx5(1), mlx5(0, 2, 3)],
        "cuda:3": [mlx5(1), mlx5(0, 2, 3)],
        "cuda:4": [mlx5(2), mlx5(0, 1, 3)],
        "cuda:5": [mlx5(2), mlx5(0, 1, 3)],
        "cuda:6": [mlx5(3), mlx5(0, 1, 2)],
        "cuda:7": [mlx5(3), mlx5(0, 1, 2)],
    }


def test_two_sockets_prefer_their_own_nic(tmp_path: Path) -> None:
    tree = two_socket(tmp_path)
    assert matrix(tree, "tcp") == {"cpu:0": [["ens0f0"], ["ens1f0"]], "cpu:1": [["ens1f0"], ["ens0f0"]]}
    assert matrix(tree, "rdma") == {"cpu:0": [[], []], "cpu:1": [[], []]}


def test_laptop(tmp_path: Path) -> None:
    tree = laptop(tmp_path)
    assert matrix(tree, "tcp") == {"cpu:0": [["wlp2s0"], ["enp0s31f6"]]}
    inventory = discover(tree.root)
    assert nic(inventory, "wlp2s0") == NicInfo("wlp2s0", "tcp", pci=("pci0000:00", "0000:00:1c.0", "0000:02:00.0"))
    assert not nic(inventory, "enp0s31f6").up
    assert inventory.gpus == ()  # the Intel one holds no KV


# ---------------------------------------------------------------- NICs that are down, odd, or not hardware


def test_a_port_that_is_down_is_secondary_and_the_next_preferred(tmp_path: Path) -> None:
    tree = hgx_like(tmp_path, nics=4)
    state = next(tree.devices.glob("**/infiniband/mlx5_0/ports/1/state"))
    state.write_text("1: DOWN\n")
    rows = matrix(tree)
    assert rows["cpu:0"] == [mlx5(1), mlx5(0, 2, 3)]
    assert rows["cuda:0"] == [mlx5(1), mlx5(0, 2, 3)]  # same socket, other host bridge
    assert rows["cuda:2"] == [mlx5(1), mlx5(0, 2, 3)]


def test_the_first_active_port_of_a_device_counts(tmp_path: Path) -> None:
    tree = SysfsTree(tmp_path)
    device = tree.function("pci0000:00/0000:00:01.0", 0, vendor="0x15b3", kind="0x020700")
    path = tree.rdma("mlx4_0", device, [("IB/RoCE v1", link_local_gid(1), "")], state="1: DOWN")
    tree.write(path / "ports/2", state="4: ACTIVE", rate="56 Gb/sec (4X FDR)")
    tree.write(path / "ports/2/gids", **{"0": link_local_gid(2)})
    inventory = discover(tmp_path)
    info = nic(inventory, "mlx4_0")
    assert (info.port, info.up, info.speed_mbit) == (2, True, 56_000)
    assert rdma_nics(inventory) == (Nic("mlx4_0", "rdma", link_local_gid(2), 2),)


def test_soft_roce_has_the_place_of_its_interface(tmp_path: Path) -> None:
    tree = two_socket(tmp_path)
    path = tree.rdma("rxe0", None, [("RoCE v2", ZERO_GID, "")], rate="2.5 Gb/sec (1X SDR)")
    tree.write(path, parent="ens1f0")
    info = nic(discover(tmp_path), "rxe0")
    assert (info.numa, info.speed_mbit, info.gids) == (1, 2500, ())
    assert info.pci == ("pci0000:b1", "0000:b1:00.0", "0000:b2:00.0")
    assert matrix(tree)["cpu:1"] == [["rxe0"], []]


def test_a_virtio_nic_has_the_place_of_its_pci_function(tmp_path: Path) -> None:
    tree = SysfsTree(tmp_path)
    tree.node(0, "0-1")
    function = tree.function("pci0000:00/0000:00:03.0", 0, vendor="0x1af4", kind="0x020000")
    tree.interface("eth0", tree.write(function / "virtio2"), speed=-1)
    info = nic(discover(tmp_path), "eth0")
    assert (info.numa, info.pci, info.virtual, info.speed_mbit) == (0, ("pci0000:00", "0000:00:03.0"), False, None)


def test_a_bond_stands_for_its_parts_and_has_their_place(tmp_path: Path) -> None:
    tree = SysfsTree(tmp_path)
    tree.node(0, "0")
    tree.node(1, "1")
    card = "pci0000:b1/0000:b1:00.0/0000:b2:00"
    parts = [
        tree.interface(f"ens1f{port}", tree.function(f"{card}.{port}", 1, vendor="0x15b3", kind="0x020000"))
        for port in range(2)
    ]
    bond, vlan = tree.interface("bond0", None, speed=50_000), tree.interface("bond0.7", None)
    tree.stack(bond, *parts)
    tree.link(vlan / "lower_bond0", bond)
    overlay = tree.interface("flannel.1", None)
    tree.write(overlay, uevent="DEVTYPE=vxlan\nINTERFACE=flannel.1")
    tree.link(overlay / "lower_bond0", bond)
    (tree.sys / "class/net/bonding_masters").write_text("bond0\n")
    inventory = discover(tmp_path)
    for name in ("bond0", "bond0.7"):
        info = nic(inventory, name)
        assert (info.virtual, info.numa, info.pci) == (False, 1, ("pci0000:b1", "0000:b1:00.0"))
    assert nic(inventory, "flannel.1").virtual
    assert matrix(tree, "tcp")["cpu:0"] == [["bond0", "bond0.7"], []]


def test_a_bond_over_two_sockets_is_near_to_both(tmp_path: Path) -> None:
    tree = two_socket(tmp_path)
    bond = tree.interface("bond0", None)
    tree.stack(bond, *((tree.sys / "class/net" / name).resolve() for name in ("ens0f0", "ens1f0")))
    info = nic(discover(tmp_path), "bond0")
    assert (info.virtual, info.numa, info.pci) == (False, None, ())
    assert matrix(tree, "tcp") == {"cpu:0": [["bond0"], []], "cpu:1": [["bond0"], []]}


def test_containers_use_their_virtual_interface(tmp_path: Path) -> None:
    tree = SysfsTree(tmp_path)
    tree.node(0, "0-3")
    tree.interface("eth0", None, speed=10_000)
    tree.loopback()
    assert matrix(tree, "tcp") == {"cpu:0": [["eth0"], []]}


@pytest.mark.parametrize(
    ("operstate", "carrier", "up"),
    [
        ("up", "1", True),
        ("down", "0", False),
        ("dormant", "1", False),
        ("lowerlayerdown", "0", False),
        ("unknown", "1", True),
        ("unknown", "0", False),
        ("unknown", None, True),
    ],
)
def test_operational_state(tmp_path: Path, operstate: str, carrier: str | None, up: bool) -> None:
    tree = SysfsTree(tmp_path)
    path = tree.interface("eth0", None, state=operstate)
    if carrier is not None:
        tree.write(path, carrier=carrier)
    assert nic(discover(tmp_path), "eth0").up is up


def test_nodes_of_memory_alone_count_and_empty_nodes_do_not(tmp_path: Path) -> None:
    tree = two_socket(tmp_path)
    tree.node(2, "", memory_kb=1 << 24)
    tree.node(3, "", memory_kb=0)
    assert matrix(tree, "tcp")["cpu:2"] == [["ens0f0", "ens1f0"], []]
    assert [node.id for node in discover(tmp_path).nodes] == [0, 1, 2]


# ---------------------------------------------------------------- GPUs as a process counts them


@pytest.mark.parametrize(
    ("visible", "switches"),
    [
        (None, [0, 0, 1, 1]),
        ("", []),
        ("3,0", [1, 0]),
        (" 2 , 1", [1, 0]),
        ("1,9,0", [0]),  # CUDA stops at the first device that does not exist
        ("-1", []),
        ("GPU-0000:44,GPU-0000:03:00.0", [1, 0]),
        ("GPU-ffff", []),
    ],
)
def test_visible_gpus(tmp_path: Path, visible: str | None, switches: list[int]) -> None:
    tree = dgx_like(tmp_path)
    for name in ("0000:03:00.0", "0000:04:00.0", "0000:43:00.0", "0000:44:00.0"):
        # the other four are another container's
        tree.write(tree.root / "proc/driver/nvidia/gpus" / name, information=f"GPU UUID: \t GPU-{name}")
    gpus = discover(tmp_path, visible_gpus=visible).gpus
    assert [gpu.index for gpu in gpus] == list(range(len(gpus)))
    assert [("pci0000:00", "pci0000:40").index(gpu.pci[0]) for gpu in gpus] == switches


# ---------------------------------------------------------------- broken trees


def test_nothing_there(tmp_path: Path) -> None:
    assert discover(tmp_path) == Inventory(nodes=(NumaNode(0, ()),))


def test_missing_and_odd_files_are_not_known(tmp_path: Path) -> None:
    tree = SysfsTree(tmp_path)
    tree.write(tree.devices / "system/node/node0", cpulist="0-1,x,7-,4-2,9")
    tree.write(tree.devices / "system/node/nodeX")
    tree.write(tree.sys / "class/net/bare0")
    odd = tree.write(tree.sys / "class/net/odd0", speed="fast", ifindex="--", operstate="", carrier="")
    (odd / "device").symlink_to("nowhere")
    unsigned = tree.write(tree.sys / "class/net/old0", speed=2**32 - 1)
    (unsigned / "numa_node").mkdir()  # a folder where a file is expected
    tree.write(tree.sys / "class/infiniband/bare_0")
    tree.write(tree.sys / "class/infiniband/odd_0/ports/1/gids", **{"0": "none", "1": "fe80::1"})
    tree.write(tree.sys / "class/infiniband/odd_0/ports/1", rate="many", state="?")
    (tree.sys / "class/infiniband/loop_0").symlink_to("loop_0")
    tree.write(tree.sys / "bus/pci/devices/0000:01:00.0", vendor="0x10de", **{"class": "0x030000"})
    tree.write(tree.sys / "bus/pci/devices/0000:02:00.0")
    inventory = discover(tmp_path)
    assert inventory.nodes == (NumaNode(0, (0, 1, 9)),)
    assert inventory.gpus == (GpuInfo(0, ("0000:01:00.0",)),)
    assert inventory.nics == (
        NicInfo("bare_0", "rdma", up=False, virtual=True),
        NicInfo("odd_0", "rdma", up=False, virtual=True, gids=(Gid(1, "", "fe80::1"),)),
        NicInfo("bare0", "tcp", virtual=True),
        NicInfo("odd0", "tcp", virtual=True),
        NicInfo("old0", "tcp", virtual=True),
    )
    assert rdma_nics(inventory) == (Nic("odd_0", "rdma", "fe80::1", 1),)
    assert tcp_nics(inventory) == ()
    assert build_topology(inventory).to_dict() == {
        "cpu:0": [[], ["bare_0", "odd_0"]],
        "cuda:0": [[], ["bare_0", "odd_0"]],
    }


@pytest.mark.parametrize("seed", range(20))
def test_any_damage_is_survived(tmp_path: Path, seed: int) -> None:
    random = Random(seed)
    tree = dgx_like(tmp_path)
    files = sorted(path for path in tree.devices.glob("**/*") if path.is_file() or path.is_symlink())
    for path in random.sample(files, len(files) // 4):
        path.unlink()
        damage = random.randrange(4)
        if damage == 0:
            path.write_bytes(random.randbytes(random.randrange(40)))
        elif damage == 1:
            path.write_text(random.choice(["-1", "4294967296", "0-999999", "9" * 30, ",", "::", "\n"]))
        elif damage == 2:
            path.mkdir()
    inventory = discover(tmp_path)
    assert {info.name for info in inventory.nics} == {*mlx5(*range(10)), *ens(*range(10)), "docker0", "lo"}
    for kind in ("rdma", "tcp"):
        topology = build_topology(inventory, kind)
        assert Topology.from_dict(topology.to_dict()) == topology
    for published in rdma_nics(inventory):
        check_nic(published)


# ---------------------------------------------------------------- addresses


LIVE = {
    "lo": Interface(5, True, ("127.0.0.1/8", "::1/128")),
    "ens0f0": Interface(1, True, ("10.0.1.5/24", "2001:db8::5/64")),
    "ens1f0": Interface(2, True, ()),
}


def test_published_are_interfaces_with_an_address(tmp_path: Path) -> None:
    tree = two_socket(tmp_path)
    inventory = discover(tmp_path, interfaces=LIVE)
    published = tcp_nics(inventory)
    assert published == (Nic("ens0f0", "tcp", "10.0.1.5", 0, "10.0.1.0/24"),)
    listening = published[0]._replace(port=7000)
    assert check_nic(listening) is listening
    assert build_topology(inventory, "tcp").to_dict() == {"cpu:0": [["ens0f0"], []], "cpu:1": [["ens0f0"], []]}
    assert tcp_nics(discover(tree.root)) == ()  # addresses are not known


def test_named_interfaces_are_published_whatever_they_are(tmp_path: Path) -> None:
    two_socket(tmp_path)
    inventory = discover(tmp_path, interfaces=LIVE)
    assert tcp_nics(inventory, ["lo"]) == (Nic("lo", "tcp", "127.0.0.1", 0, "127.0.0.0/8"),)
    assert build_topology(inventory, "tcp", ["lo", "ens1f0"]).preferred("cpu:1") == ("ens1f0", "lo")


def test_interfaces_of_another_namespace_in_sysfs_are_not_ours(tmp_path: Path) -> None:
    two_socket(tmp_path)
    ours = {
        "ens0f0": Interface(77, True, ("10.5.0.2/32",)),  # same name, another interface
        "gone0": Interface(78, False, ("2001:db8::2/64",)),
    }
    inventory = discover(tmp_path, interfaces=ours)
    assert inventory.nics == (
        NicInfo("ens0f0", "tcp", up=True, addresses=("10.5.0.2/32",), virtual=True),
        NicInfo("gone0", "tcp", up=False, addresses=("2001:db8::2/64",), virtual=True),
    )
    assert tcp_nics(inventory) == (
        Nic("ens0f0", "tcp", "10.5.0.2", 0),
        Nic("gone0", "tcp", "2001:db8::2", 0, "2001:db8::/64"),
    )


def test_published_rdma_devices_have_a_roce_v2_gid_and_network(tmp_path: Path) -> None:
    hgx_like(tmp_path, nics=4)
    live = {"ens1": Interface(2, True, ("10.1.1.1/26",))}
    published = rdma_nics(discover(tmp_path, interfaces=live))
    assert [nic.name for nic in published] == mlx5(0, 1, 2, 3)
    assert published[1] == Nic("mlx5_1", "rdma", ipv4_gid("10.1.1.1"), 1, "10.1.1.0/26")
    assert published[0].network == ""
    assert all(check_nic(nic) for nic in published)


def test_this_machine() -> None:
    inventory = discover()
    assert inventory.nodes
    loopback = [info for info in inventory.nics if info.loopback]
    assert [info.name for info in loopback] in (["lo"], [])
    Topology.from_json(build_topology(inventory, "tcp").to_json())


# ---------------------------------------------------------------- given by hand


def test_a_topology_as_text_as_a_file_and_by_environment(tmp_path: Path) -> None:
    text = '{"cpu:0": [["mlx5_2"], ["mlx5_3"]]}'
    file = tmp_path / "topology.json"
    file.write_text(text)
    expected = Topology({"cpu:0": (("mlx5_2",), ("mlx5_3",))})
    assert load_topology(f"  {text}") == expected
    assert load_topology(str(file)) == expected
    assert configured_topology({TOPOLOGY_ENV: str(file)}) == expected
    assert configured_topology({TOPOLOGY_ENV: ""}) is None
    assert configured_topology({}) is None


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("/no/such/file.json", "'/no/such/file.json'.*No such file"),
        ("", "topology file ''"),
        ("a\0b", "topology file"),
        ("{", "not JSON"),
        ("[]", "an object like"),
        ('{"cpu:0": ["mlx5_2"]}', "'cpu:0': two lists"),
        ('{"cpu:0": [[], []], "cpu:0": [[], []]}', "'cpu:0'.*twice"),
    ],
)
def test_a_wrong_topology_says_what_is_wrong(value: str, message: str) -> None:
    with pytest.raises(InvalidTransfer, match=message):
        load_topology(value)
    if value:
        with pytest.raises(InvalidTransfer, match=f"{TOPOLOGY_ENV}: .*{message}"):
            configured_topology({TOPOLOGY_ENV: value})


def test_a_wrong_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "topology.json"
    file.write_bytes(b"\xff{}")
    with pytest.raises(InvalidTransfer, match=r"topology\.json"):
        load_topology(str(file))
    with pytest.raises(InvalidTransfer, match="Is a directory"):
        load_topology(str(tmp_path))


# ---------------------------------------------------------------- the command


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOPOLOGY_ENV, raising=False)
    monkeypatch.setenv("COLUMNS", "80")


def test_the_command_prints_mooncakes_form_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = hgx_like(tmp_path, nics=4)
    assert main(["topology", "--json", "--root", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == matrix(tree)
    assert out.count("\n") == 1
    assert err == ""
    assert main(["topology", "--json", "--root", str(tmp_path), "--transport", "tcp"]) == 0
    assert json.loads(capsys.readouterr().out)["cuda:7"] == [["ens3"], ["ens0", "ens1", "ens2"]]


def test_the_command_fits_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dgx_like(tmp_path)
    assert main(["topology", "--root", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    for part in (
        "0-63,128-191",
        "cuda:7",
        "0000:c4:00.0",
        "200 Gb/s",
        "10.9.1.1 (gid 3)",
        "docker0 (virtual)",
        "(rdma)",
    ):
        assert part in out


def test_the_command_without_rdma_shows_tcp(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    laptop(tmp_path)
    assert main(["topology", "--root", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "No RDMA NICs" in out
    assert "Topology matrix (tcp)" in out
    assert main(["topology", "--json", "--root", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out) == {"cpu:0": [["wlp2s0"], ["enp0s31f6"]]}


def test_the_command_shows_a_given_matrix(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOPOLOGY_ENV, '{"cpu:0": [["mlx5_99"], []]}')
    assert main(["topology", "--json"]) == 0
    assert capsys.readouterr().out == '{"cpu:0": [["mlx5_99"], []]}\n'
    assert main(["topology"]) == 0
    out = capsys.readouterr().out
    assert f"given by {TOPOLOGY_ENV}" in out
    assert "No NIC of this host: mlx5_99" in out
    monkeypatch.setenv(TOPOLOGY_ENV, "/no/such/file")
    assert main(["topology"]) == 1
    assert capsys.readouterr().err.startswith(f"pinyon: {TOPOLOGY_ENV}: topology file '/no/such/file'")


def test_the_command_needs_a_sysfs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topology", "--root", str(tmp_path / "none")]) == 1
    assert "no directory" in capsys.readouterr().err
