"""A federation's messages read back as written, and invalid ones are refused by name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinyon.api.controller.v1 import controller_pb2
from pinyon.core.errors import InvalidArgument
from pinyon.federation.distances import Position
from pinyon.federation.view import Cluster, Federation, LbInfo, LbState, Member, OwnedCluster, RegionView
from pinyon.messages.federation import (
    check_instance,
    check_load,
    check_url,
    federation_from_proto,
    federation_to_proto,
    latencies_from_proto,
    lb_info_from_proto,
    lb_info_to_proto,
)

names = st.from_regex(r"[a-z][a-z0-9.-]{0,9}", fullmatch=True)
urls = st.from_regex(r"https?://[a-z][a-z0-9.-]{0,9}(:[1-9][0-9]{0,3})?(/[a-z0-9/]{0,5})?", fullmatch=True)
several = st.lists(urls, max_size=4, unique=True).map(tuple)
positions = st.none() | st.builds(Position, st.floats(-90, 90), st.floats(-180, 180))
clusters = st.builds(OwnedCluster, names, st.just("h:1")) | st.builds(
    OwnedCluster, names, st.just(""), st.lists(urls, min_size=1, max_size=4, unique=True).map(tuple)
)
infos = st.builds(
    LbInfo,
    *(names, names, names, st.just("host:1"), st.just("") | urls),
    st.lists(clusters, max_size=3, unique_by=lambda each: each.name).map(tuple),
    positions,
)
federations = st.builds(
    Federation,
    names,
    st.integers(0, 2**64 - 1),
    st.lists(st.builds(RegionView, names, st.lists(names, max_size=2).map(tuple), positions), max_size=3).map(tuple),
    st.lists(
        st.builds(Member, infos, st.sampled_from(LbState), st.booleans(), st.lists(names, max_size=2).map(tuple)),
        max_size=3,
    ).map(tuple),
    st.lists(
        st.builds(Cluster, names, names, st.just("") | st.just("h:1"), several, several, several, several, names),
        max_size=3,
    ).map(tuple),
)


@given(infos, federations)
def test_there_and_back(info, federation):
    assert (
        lb_info_from_proto(controller_pb2.LoadBalancerInfo.FromString(lb_info_to_proto(info).SerializeToString()))
        == info
    )
    assert federation_from_proto(federation_to_proto(federation)) == federation


@pytest.mark.parametrize(
    "url",
    [
        *("", "eu.example.org", "ftp://x", "http://", "http://x:99999", "http://me:secret@x", "http://x?q=1"),
        *("http://x#f", "http://x y", "http://x\n", "http://" + "x" * 600, "http://ü"),
    ],
)
def test_no_base_of_urls(url):
    with pytest.raises(InvalidArgument) as caught:
        check_url(url, "there")
    assert caught.value.field == "there"


def test_bases_of_urls_and_ids():
    for url in ("http://x", "https://10.0.0.1:8000/v1", "http://[::1]:80/", "http://x:65535"):
        assert check_instance(url, "x") == url
    assert check_instance("decode-0", "x") == "decode-0"
    with pytest.raises(InvalidArgument):
        check_instance("", "x")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"lb_id": ""}, "lb_id"),
        ({"boot_id": "x" * 200}, "boot_id"),
        ({"region": "eu west"}, "region"),
        ({"region": ""}, "region"),
        ({"grpc_address": "nowhere"}, "grpc_address"),
        ({"http_url": "x:1"}, "http_url"),
        ({"position": controller_pb2.Position(latitude=100)}, "position"),
        ({"clusters": [controller_pb2.OwnedCluster()]}, "clusters"),
        ({"clusters": [controller_pb2.OwnedCluster(conductor="h:1", upstream_urls=["http://x"])]}, "clusters"),
        ({"clusters": [controller_pb2.OwnedCluster(conductor="h:1")] * 2}, "clusters.name"),
        ({"clusters": [controller_pb2.OwnedCluster(name=f"c{n}", conductor="h:1") for n in range(17)]}, "clusters"),
    ],
)
def test_registrations_that_are_refused(changes, field):
    good = {"lb_id": "a", "boot_id": "1", "region": "eu", "grpc_address": "h:1"}
    with pytest.raises(InvalidArgument) as caught:
        lb_info_from_proto(controller_pb2.LoadBalancerInfo(**{**good, **changes}))
    assert caught.value.field is not None
    assert caught.value.field.endswith(field)


def test_a_cluster_without_a_name_has_its_regions():
    cluster = controller_pb2.OwnedCluster(conductor="h:1")
    message = controller_pb2.LoadBalancerInfo(
        lb_id="a", boot_id="1", region="eu", grpc_address="h:1", clusters=[cluster]
    )
    assert lb_info_from_proto(message).clusters[0].name == "eu"


@pytest.mark.parametrize(
    ("good", "wrong", "field"),
    [
        ({"per_instance": [{"name": "i"}] * 256}, {"per_instance": [{"name": "i"}] * 257}, "per_instance"),
        ({"per_instance": [{"name": "x" * 512}]}, {"per_instance": [{"name": "x" * 513}]}, "per_instance.name"),
        ({"forwarded_by_region": {"eu": 1}}, {"forwarded_by_region": {"eu west": 1}}, "forwarded_by_region"),
        (
            {"accepted_by_region": {f"r{n}": n for n in range(64)}},
            {"accepted_by_region": {f"r{n}": n for n in range(65)}},
            "accepted_by_region",
        ),
    ],
)
def test_loads_are_bounded(good, wrong, field):
    load = controller_pb2.LoadBalancerLoad(**good)
    assert check_load(load) is load
    with pytest.raises(InvalidArgument) as caught:
        check_load(controller_pb2.LoadBalancerLoad(**wrong))
    assert caught.value.field == f"load.{field}"


def test_latencies_are_bounded():
    for wrong in ({"x": -1.0}, {"x": float("nan")}, {"": 1.0}, {f"x{n}": 1.0 for n in range(257)}):
        with pytest.raises(InvalidArgument):
            latencies_from_proto(wrong)


def test_a_cluster_of_several_owners_has_more_upstreams():
    many = tuple([f"http://u{n}" for n in range(600)])
    told = Federation("e", 1, clusters=(Cluster("eu", "eu", upstreams=many, added=many[:400]),))
    assert federation_from_proto(federation_to_proto(told)) == told


@pytest.mark.parametrize(("name", "most"), [("removed_instances", 1024), ("added_instances", 1024), ("owner_ids", 256)])
def test_lists_of_a_told_cluster_are_bounded(name, most):
    for count in (most, most + 1):
        cluster = controller_pb2.Cluster(region="eu", name="eu", **{name: [f"i{n}" for n in range(count)]})
        message = controller_pb2.Federation(clusters=[cluster])
        if count <= most:
            assert federation_from_proto(message).clusters
        else:
            with pytest.raises(InvalidArgument, match=f"at most {most}"):
                federation_from_proto(message)


def test_a_load_is_kept_without_unknown_fields():
    load = controller_pb2.LoadBalancerLoad.FromString(b"\xfa\x3f\x03abc")  # field 1023, of three bytes
    assert check_load(load).SerializeToString() == b""
