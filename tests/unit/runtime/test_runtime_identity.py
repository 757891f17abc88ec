"""Names in certificates and their meaning, which is never ambiguous."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinyon.core.errors import InvalidArgument, PermissionDenied
from pinyon.runtime.identity import (
    BLOCKS_NAME,
    ROLES,
    Identity,
    check_claim,
    check_region_claim,
    cluster_identities,
    hosts_of,
    identity_from_names,
    names_region,
    peer_name,
)

LABELS = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", fullmatch=True)


class Context:
    """The parts of a servicer's context that these tests need."""

    def __init__(self, *names: str) -> None:
        self._names = [name.encode() for name in names]

    def peer_identities(self) -> list[bytes] | None:
        return self._names or None


@given(st.sampled_from(ROLES), st.one_of(st.just(""), LABELS))
def test_a_certificate_says_who_it_was_made_for(role: str, instance_id: str) -> None:
    made = Identity(role, instance_id)
    assert identity_from_names(made.names) == made
    assert identity_from_names(("lb.example.org", *reversed(made.names), "localhost")) == made


@given(st.lists(st.one_of(st.text(max_size=20), LABELS.map(lambda label: f"{label}.worker.pinyon")), max_size=6))
def test_any_names_say_one_thing_or_nothing(names: list[str]) -> None:
    said = identity_from_names(names)
    if said is not None:
        assert {name for name in names if name in said.names or name.endswith(f".{said.role}.pinyon")}


@pytest.mark.parametrize(
    "names",
    [
        (),
        ("example.org",),
        ("worker.pinyon",),  # no instance
        ("a.worker.pinyon", "b.worker.pinyon"),
        ("a.worker.pinyon", "a.lb.pinyon"),
        ("*.worker.pinyon", "a.worker.pinyon"),
        ("x.a.worker.pinyon",),
        ("a.boss.pinyon",),
        ("A.worker.pinyon",),
        (BLOCKS_NAME,),
    ],
)
def test_two_things_or_nothing_are_no_identity(names: tuple[str, ...]) -> None:
    assert identity_from_names(names) is None


@pytest.mark.parametrize("instance_id", ["Prefill-0", "a.b", "-a", "a-", "a_b", "x" * 64, "*", "ä"])
def test_what_cannot_be_in_a_name_is_no_instance(instance_id: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Identity("worker", instance_id)
    assert caught.value.field == "instance_id"


def test_a_claim_must_be_the_certificates() -> None:
    context = Context(*Identity("worker", "prefill-0").names)
    check_claim(context, "worker", "prefill-0")
    for role, instance_id in (("worker", "prefill-1"), ("kvstore", "prefill-0"), ("worker", "")):
        with pytest.raises(PermissionDenied, match="worker prefill-0"):
            check_claim(context, role, instance_id)
    check_claim(Context(*Identity("worker").names), "worker", "prefill-7")
    check_claim(Context(), "worker", "anybody")  # without TLS, no caller has an identity


def test_a_region_must_be_one_that_the_certificate_names() -> None:
    identity = Identity("lb", "lb-0")
    context = Context(*identity.names, *hosts_of(identity, (), "eu.west"))
    check_region_claim(context, "eu.west")
    for region in ("eu", "west", "us", ""):
        with pytest.raises(PermissionDenied, match="not one for the region"):
            check_region_claim(context, region)
    with pytest.raises(PermissionDenied):
        check_region_claim(Context(*identity.names), "eu")
    check_region_claim(Context(), "anywhere")  # no TLS
    assert not any(map(names_region, hosts_of(Identity("redis", "redis"), (), "eu")))
    assert identity_from_names((*identity.names, "eu.region.pinyon")) == identity


def test_who_serves_blocks_is_named_for_it() -> None:
    assert [role for role in ROLES if BLOCKS_NAME in Identity(role, "a").names] == ["kvstore", "worker"]


def test_a_local_cluster_and_its_hosts() -> None:
    identities = list(cluster_identities(prefill=2, decode=1, mixed=0, stores=1, lbs=1))
    assert [str(each) for each in identities] == [
        *("admin admin", "conductor conductor", "controller controller", "redis redis"),
        *("worker prefill-0", "worker prefill-1", "worker decode-0", "kvstore kvstore-0", "lb lb-0"),
    ]
    assert {each.role for each in identities if "example.org" in hosts_of(each, ("example.org",))} == {
        "controller", "lb", "redis",
    }  # fmt: skip
    assert hosts_of(Identity("worker", "vllm-1"), ("example.org",)) == ("vllm-1",)
    assert peer_name("lb", "lb-0") == "lb-0.lb.pinyon"
