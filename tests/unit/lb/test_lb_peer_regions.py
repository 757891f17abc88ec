"""The regions that a load balancer's certificate allows, both at other regions' doors and at its own start."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pinyon.api.lb.v1 import peer_pb2
from pinyon.core.errors import InvalidArgument, PermissionDenied
from pinyon.frontdoor.regions.inbound import Serving
from pinyon.frontdoor.regions.links import PEER_VERSION
from pinyon.frontdoor.regions.peer import PeerBalancer
from pinyon.routing.geography import Geography
from pinyon.runtime.identity import Identity, hosts_of
from pinyon.runtime.security import NO_SECURITY, Security
from services.lb.balancer import check_region
from services.lb.settings import LbSettings
from tests.tls_files import TestAuthority

CALLER = Identity("lb", "eu-0")


def context_of(*names: str) -> SimpleNamespace:
    return SimpleNamespace(peer_identities=lambda: [name.encode() for name in names] or None)


@pytest.mark.parametrize(
    ("names", "admitted"),
    [
        ((*CALLER.names, *hosts_of(CALLER, (), "eu")), True),
        ((*CALLER.names, *hosts_of(CALLER, (), "us")), False),
        (CALLER.names, False),
        ((), True),
    ],
    ids=["its region", "another region", "no region", "no certificate"],
)
def test_a_peer_is_of_the_region_its_certificate_names(names, admitted):
    door: Any = SimpleNamespace(own=PeerBalancer("us-0", "us", ""), models=SimpleNamespace(geography=Geography()))
    hello = peer_pb2.PeerHello(region="eu", lb_id="eu-0", version=PEER_VERSION)
    if admitted:
        assert Serving._checked(door, hello, context_of(*names)).region == "eu"
    else:
        with pytest.raises(PermissionDenied, match="not one for the region eu"):
            Serving._checked(door, hello, context_of(*names))


def test_a_certificate_that_does_not_name_the_region_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    authority = TestAuthority(tmp_path)
    settings = LbSettings(region="eu")
    check_region(settings, Security(authority.tls("lb", "eu-0", region="eu")))
    check_region(settings, NO_SECURITY)
    assert not caplog.records
    check_region(settings, Security(authority.tls("lb", "eu-0")))
    (told,) = caplog.records
    assert "pinyon certs DIR lb/eu-0@eu" in told.getMessage()


@pytest.mark.parametrize("region", ["a" * 64, "a..b", "a."])
def test_a_region_that_no_certificate_names_needs_no_tls(tmp_path: Path, region: str) -> None:
    settings = LbSettings(region=region)
    check_region(settings, NO_SECURITY)
    with pytest.raises(InvalidArgument, match="cannot be in a certificate") as error:
        check_region(settings, Security(TestAuthority(tmp_path).tls("lb", "eu-0")))
    assert error.value.field == "region"
