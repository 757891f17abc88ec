"""Topologies of any origin: published ones read back, invalid ones are refused, a built matrix partitions the NICs."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pinyon.transfer import InvalidTransfer, SegmentDescriptor
from pinyon.transfer.types.inventory import GpuInfo, Inventory, NicInfo, NumaNode, pci_distance
from pinyon.transfer.types.nic import Nic, check_nic
from pinyon.transfer.types.topology import Topology, build_topology
from tests.segments import segment_of, text_of

NAMES = st.text(st.characters(exclude_characters=" /", codec="ascii", min_codepoint=33, max_codepoint=126), min_size=1)
NAMES = NAMES.filter(lambda name: len(name) <= 64 and name not in (".", ".."))


@st.composite
def rows(draw: st.DrawFn) -> tuple[tuple[str, ...], tuple[str, ...]]:
    names = draw(st.lists(NAMES, unique=True, max_size=8))
    cut = draw(st.integers(0, len(names)))
    return tuple(names[:cut]), tuple(names[cut:])


TOPOLOGIES = st.builds(Topology, st.dictionaries(st.sampled_from(["*", "cpu:0", "cpu:1", "cuda:0"]) | NAMES, rows()))
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)
NEAR_TOPOLOGIES = st.dictionaries(st.text(), st.lists(st.lists(NAMES | JSON), min_size=2, max_size=2) | JSON)


@given(TOPOLOGIES)
def test_a_topology_comes_back_from_its_published_form(topology: Topology) -> None:
    assert Topology.from_dict(topology.to_dict()) == topology
    again = Topology.from_json(topology.to_json())
    assert again == topology
    assert hash(again) == hash(topology)


@given(JSON | NEAR_TOPOLOGIES)
def test_other_values_are_refused_or_are_topologies(value: Any) -> None:
    for parse, form in ((Topology.from_dict, value), (Topology.from_json, json.dumps(value))):
        with suppress(InvalidTransfer):
            assert parse(form).to_dict() == value


@given(st.text())
def test_other_text_is_refused(text: str) -> None:
    with suppress(InvalidTransfer):
        Topology.from_json(text)


@given(TOPOLOGIES, st.sets(NAMES), st.sampled_from(["cpu:0", "cuda:0", "npu:9"]))
def test_restriction_is_an_intersection(topology: Topology, names: set[str], location: str) -> None:
    kept = names | set(topology.nics[::2])
    restricted = topology.restricted(kept)
    for pick in (Topology.preferred, Topology.secondary):
        if location in topology.rows or "*" in topology.rows:
            assert pick(restricted, location) == tuple(name for name in pick(topology, location) if name in kept)
    assert set(restricted.nics) == set(topology.nics) & kept


NICS = st.builds(
    Nic,
    name=NAMES | JSON,
    transport=st.sampled_from(["tcp", "rdma"]) | JSON,
    address=st.ip_addresses().map(str) | JSON,
    port=st.integers(0, 70000) | JSON,
    network=st.sampled_from(["", "10.0.1.0/24", "2001:db8::/64"]) | JSON,
)


@given(NICS)
def test_a_nic_is_refused_or_comes_back(nic: Nic) -> None:
    try:
        check_nic(nic)
    except InvalidTransfer:
        return
    segment = SegmentDescriptor("h", 1, bytes(16), nics=(nic,))
    assert segment_of(text_of(segment)) == segment


NODE = st.none() | st.integers(0, 2)
PCI = st.lists(st.sampled_from("abc"), max_size=5).map(tuple)


@st.composite
def inventories(draw: st.DrawFn) -> Inventory:
    nics = [
        NicInfo(f"n{index}", "rdma", pci=draw(PCI), numa=draw(NODE), up=draw(st.booleans()))
        for index in range(draw(st.integers(0, 6)))
    ]
    gpus = [GpuInfo(index, draw(PCI), draw(NODE)) for index in range(draw(st.integers(0, 3)))]
    return Inventory(tuple(NumaNode(node, ()) for node in range(draw(st.integers(0, 3)))), tuple(nics), tuple(gpus))


@given(inventories())
def test_a_matrix_has_each_nic_once_and_the_nearest_preferred(host: Inventory) -> None:
    topology = build_topology(host)
    up = {nic.name: nic for nic in host.nics if nic.up}
    locations = [f"cpu:{node.id}" for node in host.nodes] + [f"cuda:{gpu.index}" for gpu in host.gpus]
    assert list(topology.rows) == locations
    for location in locations:
        preferred, secondary = topology.preferred(location), topology.secondary(location)
        assert sorted(preferred + secondary) == sorted(nic.name for nic in host.nics)
        assert set(preferred) <= set(up)
        assert bool(preferred) == bool(up)
    for gpu in host.gpus:
        first = topology.preferred(f"cuda:{gpu.index}")
        near = {pci_distance(gpu, up[name]) for name in first}
        assert len(near) <= 1
        assert all(pci_distance(gpu, up[name]) > min(near) for name in up if name not in first)
    for node in host.nodes:
        local = [name for name, nic in up.items() if nic.numa in (None, node.id)]
        assert topology.preferred(f"cpu:{node.id}") == tuple(local or up)
