"""Sessions that began before a controller started: what it takes of what they knew, by its own clock."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from pinyon.api.controller.v1 import controller_pb2
from pinyon.federation.view import Cluster, Federation, LbInfo, LbState, OwnedCluster
from pinyon.messages.federation import federation_to_proto
from pinyon.runtime.identity import Identity
from services.controller.app import Controller, build
from services.controller.servicer import known_of
from services.controller.settings import ControllerSettings
from services.controller.state_file import _write

GRACE_S = 10.0


def info(lb_id: str) -> LbInfo:
    region = lb_id.partition("-")[0]
    return LbInfo(lb_id, "1", region, "127.0.0.1:1", clusters=(OwnedCluster(region, "10.0.0.1:7000"),))


class World:
    """A controller that starts at second 1000 with a state file, or without one."""

    def __init__(self, tmp_path, file: Federation | None = None) -> None:
        self.now_s = 1000.0
        path = tmp_path / "state.json"
        if file is not None:
            _write(path, file)
        settings = ControllerSettings(state_file=str(path) if file is not None else "", grace_s=GRACE_S)
        self.controller: Controller = build(settings, CollectorRegistry(), lambda: self.now_s)

    def comes(self, lb_id: str, known: Federation | None = None) -> None:
        self.controller.control.register(info(lb_id), known)

    @property
    def federation(self) -> Federation:
        return self.controller.registry.federation

    @property
    def ids(self) -> list[str]:
        return [each.info.lb_id for each in self.federation.members]

    def silent(self, lb_id: str) -> None:
        """Leaves two probes of the load balancer unanswered."""
        for _ in range(2):
            self.controller.registry.probed(lb_id, "1", False, self.now_s, self.now_s)
        self.controller.control.settle()

    def state_of(self, lb_id: str) -> LbState:
        return next(each.state for each in self.federation.members if each.info.lb_id == lb_id)


@pytest.fixture
async def old(tmp_path) -> tuple[Federation, Federation]:
    """Returns a federation of an earlier controller, and the same federation some versions later.

    The controller is built in a running loop."""
    world = World(tmp_path)
    world.comes("b-0")
    early = world.federation
    world.comes("a-0")
    return early, world.federation


async def test_what_had_not_reached_the_file_is_recovered(tmp_path, old):
    early, late = old
    world = World(tmp_path, early)
    assert world.ids == ["b-0"]
    world.comes("b-0", late)
    assert (world.ids, world.federation.epoch) == (["a-0", "b-0"], early.epoch)
    world.now_s += GRACE_S - 0.1
    world.silent("a-0")
    assert world.state_of("a-0") is LbState.LIVE, "not yet"
    world.now_s += 0.1
    world.silent("a-0")
    assert world.state_of("a-0") is LbState.FAILED
    assert next(each.adopter for each in world.federation.clusters if each.region == "a") == "b-0"


async def test_what_is_on_the_file_or_told_since_is_not_recovered(tmp_path, old):
    _, late = old
    world = World(tmp_path, late)
    world.comes("b-0", late)
    world.controller.registry.remove_instance("b", "", "w")
    told = world.federation
    world.controller.registry.add_instance("b", "", "w")
    world.comes("b-0", told)
    assert not any(each.removed for each in world.federation.clusters)


async def test_what_never_reached_the_file_in_two_lives_is_recovered(tmp_path, old):
    early, late = old
    second = World(tmp_path, early)
    second.comes("b-0", late)
    second.controller.registry.remove_instance("b", "b", "w")
    told = second.federation
    third = World(tmp_path, early)  # the disk refused all that the second controller knew
    assert third.federation.version < told.version
    for _ in range(2):  # first under the old epoch, then under the new one
        third.comes("b-0", told)
        assert third.ids == ["a-0", "b-0"]
        assert [each.removed for each in third.federation.clusters if each.region == "b"] == [("w",)]
        assert third.federation.epoch != told.epoch
        told = replace(told, version=told.version + 1)


async def test_nothing_is_recovered_after_the_grace_time(tmp_path, old):
    early, late = old
    for file in (early, None):
        world = World(tmp_path, file)
        world.now_s += GRACE_S
        world.comes("b-0", late)
        assert world.ids == ["b-0"]


async def test_a_later_version_begins_another_epoch(tmp_path, old):
    _, late = old
    world = World(tmp_path, late)
    before = world.federation
    world.comes("b-0", Federation(before.epoch, 2**64 - 1))
    assert world.federation.epoch != before.epoch
    assert world.federation.version < before.version + 9


async def test_a_stranger_cannot_remove_instances_of_other_clusters(tmp_path):
    world = World(tmp_path)
    world.comes("b-0")
    told = Cluster("b", "b", "10.0.0.1:7000", removed=("w",), owners=("b-0",))
    world.comes("x-0", Federation("old", 9, clusters=(told,)))
    assert not any(each.removed for each in world.federation.clusters)
    world.comes("b-0", Federation("old", 9, clusters=(told,)))
    assert any(each.removed for each in world.federation.clusters), "its owner may say so"


# ---------------------------------------------------------------- what a load balancer may say that it knew


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
