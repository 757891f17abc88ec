"""The federation that a load balancer reports that it knew, as far as it may report it."""

from __future__ import annotations

import pytest

from pinyon.api.controller.v1 import controller_pb2
from pinyon.federation.view import Cluster, Federation
from pinyon.messages.federation import federation_to_proto
from pinyon.runtime.identity import Identity
from services.controller.servicer import known_of

CLUSTER = Cluster("a", "a", "", ("http://1",), ("http://2",), ("http://1",), ("a-0",))


class Context:
    """The context of a call from that address, with a certificate of these names."""

    def __init__(self, peer: str, names: tuple[str, ...] = ()) -> None:
        self._peer, self._names = peer, names

    def peer(self) -> str:
        return self._peer

    def peer_identities(self) -> list[bytes] | None:
        return [name.encode() for name in self._names] or None


@pytest.mark.parametrize(
    ("context", "believed"),
    [
        (Context("ipv4:10.0.0.9:999"), False),
        (Context("ipv4:127.0.0.1:999"), True),
        (Context("ipv4:10.0.0.9:999", Identity("lb", "a-0").names), True),
    ],
    ids=["elsewhere", "this machine", "certificate"],
)
def test_changes_by_hand_are_taken_from_who_may_make_them(context, believed):
    known = Federation("old", 3, clusters=(CLUSTER,))
    message = controller_pb2.SessionRequest(known=federation_to_proto(known))
    found = known_of(message, context)
    assert found is not None
    (cluster,) = found.clusters
    assert (cluster.added, cluster.removed) == ((CLUSTER.added, CLUSTER.removed) if believed else ((), ()))
    assert cluster.owners == CLUSTER.owners


def test_what_cannot_be_understood_is_left_out():
    message = controller_pb2.SessionRequest(known=controller_pb2.Federation(clusters=[controller_pb2.Cluster()]))
    peer = "ipv4:127.0.0.1:9"
    assert known_of(message, Context(peer)) is None
    assert known_of(controller_pb2.SessionRequest(), Context(peer)) is None
