"""The registry: failed members, forgotten members, changes by people, restarts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pinyon.core.errors import FailedPrecondition, InvalidArgument, NotFound, PinyonError, ResourceExhausted
from pinyon.federation.clusters import CHANGES_MAX
from pinyon.federation.registry import VERSION_JUMP, LbRegistry
from pinyon.federation.view import Cluster, Federation, LbInfo, LbState, Member, OwnedCluster
from pinyon.federation.watched import Timing
from pinyon.routing.geography import Geography, Rule

TIMING = Timing(silence_s=2.0, probes=2, grace_s=10.0, settle_s=5.0, settle_max_s=60.0, calm_s=300.0, lease_s=5.0)


def info(lb_id: str, boot: str = "1", **changes) -> LbInfo:
    region = lb_id.partition("-")[0]
    clusters = changes.pop("clusters", (OwnedCluster(region, "10.0.0.1:7000"),))
    return LbInfo(lb_id, boot, region, f"{lb_id}:8001", clusters=clusters, **changes)


class World:
    def __init__(self, *lb_ids: str, **changes) -> None:
        self.now_s = 1000.0
        self.registry = LbRegistry("e", self.now_s, TIMING, **changes)
        self.sessions = {lb_id: self.registry.register(info(lb_id), self.now_s) for lb_id in lb_ids}
        self.registry.sweep(self.now_s)

    def dies(self, lb_id: str, answers: int = 2) -> list[str]:
        """Breaks the load balancer's session and leaves ``answers`` probes unanswered; returns the swept ids."""
        self.registry.lost(self.sessions[lb_id], self.now_s)
        boot = self.state_of(lb_id).info.boot_id
        for _ in range(answers):
            self.registry.probed(lb_id, boot, False, self.now_s, self.now_s)
        return [each.lb_id for each in self.registry.sweep(self.now_s)]

    def returns(self, lb_id: str, boot: str) -> None:
        self.sessions[lb_id] = self.registry.register(info(lb_id, boot), self.now_s)
        self.registry.sweep(self.now_s)

    def later(self, seconds: float) -> None:
        self.now_s += seconds
        for session in self.sessions.values():
            self.registry.heard(session, None, {}, False, self.now_s)
        self.registry.sweep(self.now_s)

    def state_of(self, lb_id: str):
        return next(each for each in self.registry.federation.members if each.info.lb_id == lb_id)

    def adopter(self, region: str) -> str:
        return next(each.adopter for each in self.registry.federation.clusters if each.region == region)


def test_who_died_has_its_cluster_adopted_and_gets_it_back():
    world = World("a-0", "b-0", "c-0", table={("a", "b"): 80.0, ("a", "c"): 20.0})
    assert world.dies("a-0", answers=1) == [], "one probe may be lost"
    assert world.dies("a-0", answers=1) == ["a-0"]
    assert world.adopter("a") == "c-0", "the closest"
    assert world.dies("c-0") == ["c-0"], "several failures at once"
    assert world.adopter("a") == world.adopter("c") == "b-0"
    world.returns("a-0", "2")
    assert world.adopter("a") == "b-0", "not before it has been there for a while"
    world.later(TIMING.settle_s)
    assert world.adopter("a") == ""
    assert world.adopter("c") == "b-0"
    assert (world.registry.failures, world.registry.takeovers, world.registry.handbacks) == (2, 3, 1)


def test_repeated_failures_lengthen_the_wait_until_forgotten():
    world = World("a-0", "b-0")
    for number, hold_s in enumerate((5, 10, 20, 40, 60, 60)):
        world.dies("a-0")
        world.returns("a-0", f"again{number}")
        world.later(hold_s - 0.1)
        assert world.adopter("a") == "b-0"
        world.later(0.1)
        assert world.adopter("a") == ""
    world.later(TIMING.calm_s)
    world.dies("a-0")
    world.returns("a-0", "calm")
    world.later(5)
    assert world.adopter("a") == ""


def test_one_that_only_lost_its_session_goes_on():
    world = World("a-0", "b-0")
    world.registry.lost(world.sessions["a-0"], world.now_s)
    world.registry.probed("a-0", "1", True, world.now_s, world.now_s)
    world.later(100)
    member = world.state_of("a-0")
    assert (member.state, member.connected) == (LbState.LIVE, False)
    assert world.adopter("a") == ""


def test_a_frozen_one_has_failed_though_its_session_stands():
    world = World("a-0", "b-0")
    began_s = world.now_s
    for _ in range(5):
        world.registry.probed("a-0", "1", False, began_s, world.now_s)
    assert world.registry.sweep(world.now_s) == [], "it was heard just now"
    world.now_s += TIMING.silence_s + 0.1
    world.registry.heard(world.sessions["b-0"], None, {}, False, world.now_s)
    for _ in range(2):
        world.registry.probed("a-0", "1", False, began_s, world.now_s)
    assert world.registry.sweep(world.now_s) == [], "probes that began before it was silent say nothing"
    for _ in range(2):
        world.registry.probed("a-0", "1", False, world.now_s, world.now_s)
    assert [each.lb_id for each in world.registry.sweep(world.now_s)] == ["a-0"]
    assert world.state_of("a-0").connected
    world.registry.probed("a-0", "1", True, world.now_s, world.now_s)
    world.registry.sweep(world.now_s)
    assert world.state_of("a-0").state is LbState.LIVE


def test_a_controller_that_stood_still_blames_nobody():
    world = World("a-0", "b-0")
    world.now_s += 60
    for _ in range(2):
        world.registry.probed("a-0", "1", False, world.now_s - 50, world.now_s)
    world.registry.stood_still(60)
    assert world.registry.sweep(world.now_s) == []
    assert not any(each.suspected(world.now_s, TIMING) for each in world.registry.watched())


def test_law_is_above_distance():
    law = Geography(rules=(Rule(("a",), ("c",)),))
    world = World("a-0", "b-0", geography=law, table={("a", "b"): 1.0})
    world.dies("a-0")
    assert world.adopter("a") == ""
    world.returns("c-0", "1")
    assert world.adopter("a") == "c-0"


def test_load_balancers_of_a_region_stand_in_for_each_other():
    world = World("a-0", "a-1", "b-0")
    world.dies("a-0")
    assert world.adopter("a") == ""
    world.dies("a-1")
    assert world.adopter("a") == "b-0"
    (cluster,) = [each for each in world.registry.federation.clusters if each.region == "a"]
    assert cluster.owners == ("a-0", "a-1")


def test_measured_latencies_override_a_table_in_both_directions():
    world = World("a-0", "b-0", "c-0", table={("a", "b"): 1.0, ("a", "c"): 50.0})
    world.registry.heard(world.sessions["a-0"], None, {"b-0": 90.0}, False, world.now_s)
    world.registry.heard(world.sessions["b-0"], None, {"a-0": 70.0, "nobody": 1.0}, False, world.now_s)
    assert world.registry.distances().ms("a", "b") == world.registry.distances().ms("b", "a") == 80.0
    world.dies("a-0")
    assert world.adopter("a") == "c-0"


def test_draining_and_leaving_are_no_failures():
    world = World("a-0", "b-0")
    world.registry.heard(world.sessions["a-0"], None, {}, True, world.now_s)
    assert world.registry.sweep(world.now_s) == []
    assert (world.adopter("a"), world.state_of("a-0").state) == ("b-0", LbState.DRAINING)
    world.registry.left(world.sessions["a-0"], world.now_s)
    world.registry.probed("a-0", "1", True, world.now_s, world.now_s)
    assert world.registry.sweep(world.now_s) == []
    assert (world.adopter("a"), world.state_of("a-0").state) == ("b-0", LbState.LEFT)
    assert not world.registry.heard(world.sessions.pop("a-0"), None, {}, False, world.now_s)
    world.returns("a-0", "2")
    assert world.adopter("a") == "b-0"
    world.later(TIMING.settle_s)
    assert world.adopter("a") == ""
    assert world.registry.failures == 0


def test_two_regions_do_not_fight_for_one_name():
    world = World("a-0", "b-0")
    namesake = LbInfo("a-0", "x", "b", "h:1")
    with pytest.raises(FailedPrecondition, match="unique over all regions"):
        world.registry.register(namesake, world.now_s)
    assert world.registry.heard(world.sessions["a-0"], None, {}, False, world.now_s)
    world.dies("a-0")
    world.registry.register(namesake, world.now_s)
    assert world.state_of("a-0").info.region == "b", "it moved"


# ---------------------------------------------------------------- versions


def test_only_what_load_balancers_must_know_makes_a_version():
    world = World("a-0")
    version = world.registry.federation.version
    world.registry.heard(world.sessions["a-0"], "7 wait", {"b-0": 3.0}, False, world.now_s)
    world.later(1)
    assert world.registry.federation.version == version
    world.registry.update(world.sessions["a-0"], info("a-0", http_url="http://a:1"))
    assert world.registry.federation.version == version + 1
    with pytest.raises(InvalidArgument):
        world.registry.update(world.sessions["a-0"], info("a-1"))
    world.registry.geography = Geography(tags={"a": ("eu",)})
    world.later(1)
    assert world.registry.federation.regions[0].tags == ("eu",)
    assert world.registry.federation.version == version + 2


def test_what_is_news():
    old, new = Federation("e", 3), Federation("e", 4)
    assert new.follows(old)
    assert not old.follows(new)
    assert not old.follows(old)
    assert old.follows(None)
    assert Federation("f", 1).follows(new), "another memory begins anew"


# ---------------------------------------------------------------- people


UPSTREAMS = OwnedCluster("u", upstreams=("http://1", "http://2"))


def cluster_of(registry: LbRegistry, region: str) -> Cluster:
    return next(each for each in registry.federation.clusters if each.region == region)


def test_instances_come_and_go_by_hand():
    registry = LbRegistry("e", 0.0, TIMING)
    registry.register(info("u-0", clusters=(UPSTREAMS,)), 0.0)
    registry.register(info("a-0"), 0.0)
    assert registry.remove_instance("u", "", "http://1")
    assert not registry.remove_instance("u", "u", "http://1")
    assert registry.add_instance("u", "", "http://3")
    assert cluster_of(registry, "u").upstreams == ("http://2", "http://3")
    assert registry.add_instance("u", "", "http://1")
    assert registry.remove_instance("u", "", "http://3")
    assert cluster_of(registry, "u").upstreams == ("http://1", "http://2")
    assert registry.remove_instance("a", "", "decode-0")
    assert cluster_of(registry, "a").removed == ("decode-0",)
    assert registry.add_instance("a", "", "decode-0")
    for wrong in (("a", "", "decode-0"), ("a", "", "http://1"), ("nowhere", "", "x"), ("a", "b", "x")):
        with pytest.raises(PinyonError):
            registry.add_instance(*wrong)
    for number in range(CHANGES_MAX):
        registry.remove_instance("a", "", f"w{number}")
    with pytest.raises(ResourceExhausted):
        registry.remove_instance("a", "", "one more")


def test_what_shares_a_cluster_is_put_together():
    registry = LbRegistry("e", 0.0, TIMING)
    registry.register(info("u-0", clusters=(UPSTREAMS,)), 0.0)
    other = registry.register(info("u-1", clusters=(OwnedCluster("u", upstreams=("http://9",)),)), 0.0)
    assert cluster_of(registry, "u").upstreams == ("http://1", "http://2", "http://9")
    registry.left(other, 1.0)
    registry.sweep(1.0)
    assert cluster_of(registry, "u").upstreams == ("http://1", "http://2"), "who is gone is not asked"


def test_an_absent_member_is_forgotten_on_request_or_for_room():
    registry = LbRegistry("e", 0.0, TIMING, members_max=2)
    first = registry.register(info("a-0"), 0.0)
    registry.register(info("b-0"), 0.0)
    with pytest.raises(FailedPrecondition):
        registry.forget("a-0")
    with pytest.raises(NotFound):
        registry.forget("c-0")
    with pytest.raises(ResourceExhausted):
        registry.register(info("c-0"), 0.0)
    registry.remove_instance("a", "", "w")
    registry.left(first, 1.0)
    registry.register(info("c-0"), 1.0)
    assert [each.region for each in registry.federation.clusters] == ["b", "c"]
    with pytest.raises(NotFound):
        registry.remove_instance("a", "", "w")


# ---------------------------------------------------------------- memory


def restarted(world: World, epoch: str = "e") -> LbRegistry:
    registry = LbRegistry(epoch, world.now_s, TIMING)
    registry.recover(world.registry.federation, world.now_s)
    return registry


@pytest.mark.parametrize("epoch", ["e", "lost"])
def test_a_restart_keeps_who_serves_what(epoch):
    world = World("a-0", "b-0")
    world.registry.register(info("u-0", clusters=(UPSTREAMS,)), world.now_s)
    world.registry.add_instance("u", "", "http://3")
    world.registry.remove_instance("u", "", "http://1")
    world.dies("a-0")
    before = world.registry.federation
    registry = restarted(world, epoch)
    after = registry.federation
    assert after.clusters == before.clusters
    assert [each.info for each in after.members] == [each.info for each in before.members]
    assert (after.version > before.version + VERSION_JUMP / 2) == (epoch == "e")
    registry.sweep(world.now_s)
    assert registry.federation.clusters == before.clusters
    # No member was heard yet, and none is dead.
    for _ in range(3):
        for lb_id in ("b-0", "u-0"):
            registry.probed(lb_id, "1", False, world.now_s, world.now_s)
    assert registry.sweep(world.now_s + TIMING.grace_s - 0.1) == []
    assert cluster_of(registry, "a").adopter == "b-0"
    failed = registry.sweep(world.now_s + TIMING.grace_s)
    assert [each.lb_id for each in failed] == ["b-0", "u-0"]


def test_who_was_heard_since_the_restart_can_fail_at_once():
    world = World("a-0", "b-0")
    world.registry = restarted(world)
    world.returns("b-0", "1")
    assert world.dies("b-0") == ["b-0"]


def test_what_was_heard_since_counts_more_than_memory():
    world = World("a-0", "b-0")
    world.registry.remove_instance("a", "", "w")
    registry = LbRegistry("other", world.now_s, TIMING)
    registry.register(info("a-0", "2"), world.now_s)
    registry.remove_instance("a", "", "w")
    registry.add_instance("a", "", "w")
    registry.recover(world.registry.federation, world.now_s)
    assert next(each for each in registry.federation.members if each.info.lb_id == "a-0").info.boot_id == "2"


def test_a_later_version_elsewhere_renews_the_epoch():
    registry = World("a-0", "b-0").registry
    before = registry.federation
    registry.renew("f")
    after = registry.federation
    assert (after.epoch, after.version) == ("f", before.version + 1)
    assert after.follows(Federation("e", 2**64 - 1)), "whatever was told"


# ---------------------------------------------------------------- what a session says of before


def told(session_of: LbInfo, known: Federation, *others: LbInfo) -> LbRegistry:
    """Returns the registry of a new controller after that load balancer has come and reported what it knew."""
    registry = LbRegistry("new", 1000.0, TIMING)
    for each in (*others, session_of):
        registry.register(each, 1000.0)
    registry.recover(known, 1000.0, session_of)
    registry.sweep(1000.0)
    return registry


EVIL = Cluster("u", "u", upstreams=("http://evil",), added=("http://evil",), removed=("http://1",), owners=("u-0",))


def test_a_session_adds_and_removes_for_own_clusters_only():
    known = Federation("old", 9, clusters=(EVIL,))
    owner, stranger = info("u-0", clusters=(UPSTREAMS,)), info("x-0")
    after = cluster_of(told(stranger, known, owner), "u")
    assert (after.upstreams, after.added, after.removed) == (UPSTREAMS.upstreams, (), ())
    after = cluster_of(told(owner, known, stranger), "u")
    assert (after.upstreams, after.added, after.removed) == (
        ("http://2", "http://evil"),
        ("http://evil",),
        ("http://1",),
    )


def test_an_owner_that_knows_less_does_not_count():
    registry = LbRegistry("new", 0.0, TIMING)
    for lb_id, version, removed in (("u-0", 9, ()), ("u-1", 8, ("http://1",))):
        each = info(lb_id, clusters=(UPSTREAMS,))
        registry.register(each, 0.0)
        registry.recover(Federation("old", version, clusters=(replace(EVIL, removed=removed),)), 0.0, each)
    assert cluster_of(registry, "u").removed == ()


@pytest.mark.parametrize("first", ["an owner", "the file"])
@pytest.mark.parametrize("added", [(), ("http://1",)])
def test_an_owner_that_knows_more_replaces_what_was_recovered(first: str, added: tuple[str, ...]):
    registry = LbRegistry("old", 0.0, TIMING)
    owners = [info(lb_id, clusters=(UPSTREAMS,)) for lb_id in ("u-0", "u-1")]
    for each in owners:
        registry.register(each, 0.0)

    def says(version: int, by: LbInfo | None, added: tuple[str, ...], removed: tuple[str, ...]) -> None:
        cluster = replace(EVIL, added=added, removed=removed)
        registry.recover(Federation("old", version, clusters=(cluster,)), 0.0, by)

    says(5, owners[0] if first == "an owner" else None, ("http://5",), ("http://1", "http://2"))
    registry.remove_instance("u", "u", "http://2")  # this removal counts more
    says(7, owners[1], added, ())
    after = cluster_of(registry, "u")
    assert (after.added, after.removed) == (added, ("http://2",))


def test_a_session_does_not_say_where_others_servers_are():
    dead = Member(LbInfo("u-0", "1", "u", "u-0:8001"), LbState.FAILED, False, ("2",))
    conductor = Cluster("u", "c", "10.0.0.9:7000", owners=("u-0",))
    known = Federation("old", 9, members=(dead,), clusters=(EVIL, conductor))
    registry = told(info("x-0"), known)
    assert [(each.name, each.conductor) for each in registry.federation.clusters if each.region == "u"] == [
        ("c", "10.0.0.9:7000")
    ]
    registry.register(info("u-0", "2"), 1000.0)  # the session does not decide who may register either


def test_a_session_says_which_boots_lost_its_name():
    own = Member(info("a-0", "2", clusters=()), LbState.LIVE, True, ("1",))
    registry = told(info("a-0", "2"), Federation("old", 9, members=(own,)))
    with pytest.raises(FailedPrecondition):
        registry.register(info("a-0", "1"), 1000.0)


def test_who_is_known_by_hearsay_makes_room():
    ghosts = [Member(info(f"g-{n}", clusters=()), LbState.LIVE, True) for n in range(9)]
    registry = LbRegistry("new", 0.0, TIMING, members_max=3)
    registry.register(info("a-0"), 0.0)
    registry.recover(Federation("old", 9, members=tuple(ghosts)), 0.0, info("a-0"))
    assert len(registry.federation.members) == 3
    for lb_id in ("b-0", "c-0"):
        registry.register(info(lb_id), 0.0)
    assert [each.info.lb_id for each in registry.federation.members] == ["a-0", "b-0", "c-0"]
    with pytest.raises(ResourceExhausted):
        registry.register(info("d-0"), 0.0)


def test_who_is_known_by_the_own_file_makes_no_room():
    before = LbRegistry("e", 0.0, TIMING, members_max=2)
    for lb_id in ("a-0", "b-0"):
        before.register(info(lb_id), 0.0)
    before.remove_instance("a", "a", "w")
    registry = LbRegistry("e", 100.0, TIMING, members_max=2)
    registry.recover(before.federation, 100.0)
    with pytest.raises(ResourceExhausted):
        registry.register(info("c-0"), 100.0)
    assert cluster_of(registry, "a").removed == ("w",)


def test_more_changes_than_there_is_room_for_are_left_out():
    many = tuple([f"w{n}" for n in range(CHANGES_MAX + 5)])
    registry = told(info("a-0"), Federation("old", 1, clusters=(Cluster("a", "a", removed=many, owners=("a-0",)),)))
    assert len(cluster_of(registry, "a").removed) == CHANGES_MAX


# ---------------------------------------------------------------- leases


def test_a_lease_ends_only_in_favour_of_somebody_who_serves():
    cluster = Cluster("a", "a", owners=("a-0", "a-1"), adopter="b-0")
    federation = Federation("e", 1, clusters=(cluster,))
    assert federation.adopted_now("c-0", 0.0, 5.0, ()) == ()
    assert federation.adopted_now("b-0", 4.9, 5.0, ("a-0",)) == (cluster,), "the controller knows best"
    assert federation.adopted_now("b-0", 1e9, 5.0, ("c-0",)) == (cluster,), "nobody else would"
    assert federation.adopted_now("b-0", 5.0, 5.0, ("a-1",)) == ()
