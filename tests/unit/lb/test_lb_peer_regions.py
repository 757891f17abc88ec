"""The door for other regions: which region a caller with a certificate may be of."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pinyon.api.lb.v1 import peer_pb2
from pinyon.core.errors import PermissionDenied
from pinyon.routing.geography import Geography
from pinyon.runtime.identity import Identity, hosts_of
from services.lb.regions.peer import Peer
from services.lb.regions.servicer import PeerServicer

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
    serving = SimpleNamespace(kind=peer_pb2.PEER_KIND_UNSPECIFIED, geography=Geography())
    door = PeerServicer(SimpleNamespace(own=Peer("us-0", "us", ""), serving=serving))
    hello = peer_pb2.PeerHello(region="eu", lb_id="eu-0", nonce=b"n" * 16, version=1)
    if admitted:
        assert door._checked(hello, context_of(*names)).region == "eu"
    else:
        with pytest.raises(PermissionDenied, match="not one for the region eu"):
            door._checked(hello, context_of(*names))
