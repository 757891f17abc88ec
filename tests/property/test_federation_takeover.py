"""Adoption of the clusters of failed load balancers in seeded worlds: against a plain rule, and over time."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinyon.core.errors import FailedPrecondition
from pinyon.federation.registry import LbRegistry
from pinyon.federation.takeover import Standing, assign
from pinyon.federation.view import Federation, LbInfo, LbState, OwnedCluster
from pinyon.federation.watched import Timing
from pinyon.routing.geography import Geography, Rule
from tests.long import usually

SEEDS = usually(5, long=1000)
"""Seeds in each of ten blocks."""
REGIONS = ("a", "b", "c", "d")


# ---------------------------------------------------------------- one decision, against the rule in plain words


@st.composite
def decisions(draw):
    standings = {}
    for number in range(draw(st.integers(1, 7))):
        serves = draw(st.booleans())
        hears = draw(st.booleans())
        standings[f"lb{number}"] = Standing(
            f"lb{number}",
            draw(st.sampled_from(REGIONS)),
            serves,
            serves and draw(st.booleans()),
            hears,
            hears or draw(st.booleans()),
        )
    ids = sorted(standings)
    owners = {
        (standings[lb_id].region, f"k{draw(st.integers(0, 2))}"): draw(st.sets(st.sampled_from(ids), min_size=1))
        for lb_id in draw(st.sets(st.sampled_from(ids)))
    }
    clusters = [(key, tuple(sorted(each))) for key, each in sorted(owners.items())]
    adoptions = {key: draw(st.sampled_from([*ids, "gone"])) for key, _ in clusters if draw(st.booleans())}
    forbidden = draw(st.sets(st.tuples(st.sampled_from(REGIONS), st.sampled_from(REGIONS))))
    far = {pair: draw(st.integers(0, 2)) for pair in ((x, y) for x in REGIONS for y in REGIONS)}
    return clusters, standings, adoptions, forbidden, far


@given(decisions())
def test_an_assignment_keeps_its_rules(decision):
    clusters, standings, adoptions, forbidden, far = decision

    def sends(one: str, other: str) -> bool:
        return (one, other) not in forbidden

    def distance(one: str, other: str) -> float:
        return float(far[one, other])

    chosen = assign(clusters, standings, adoptions, sends, distance)
    assert chosen == assign(list(reversed(clusters)), dict(reversed(standings.items())), adoptions, sends, distance)
    for key, owners in clusters:
        serving = [standings[each] for each in owners if standings[each].serves]
        before = standings.get(adoptions.get(key, ""))
        may = before is not None and (before.serves and before.lb_id not in owners and sends(key[0], before.region))
        could = [
            each
            for each in standings.values()
            if each.serves and each.hears and each.lb_id not in owners and sends(key[0], each.region)
        ]
        adopter = chosen.get(key)
        if any(owner.steady for owner in serving):
            assert adopter is None
        elif may and before.keeps:
            assert adopter == adoptions[key]
        elif serving:
            assert adopter is None
        elif not could:
            assert adopter == (adoptions[key] if may else None)
        else:
            assert adopter is not None
            winner = standings[adopter]
            assert winner in could
            first = min((not each.steady, distance(key[0], each.region)) for each in could)
            assert (not winner.steady, distance(key[0], winner.region)) == first, "nobody closer was passed over"
    assert set(chosen) <= {key for key, _ in clusters}


# ---------------------------------------------------------------- worlds over time

TICK_S = 0.25
TIMING = Timing(grace_s=3.0, settle_s=2.0, settle_max_s=16.0, calm_s=40.0, lease_s=3.0)
DETECT_S = TIMING.silence_s + (TIMING.probes + 2) * TICK_S
"""Seconds to detect a frozen one: it is suspected after the silence, and only later probes count."""


@dataclass
class Lb:
    """The true state of a load balancer; the controller sees only its messages."""

    info: LbInfo
    runs: bool = True
    frozen: bool = False
    cut: bool = False
    """True if cut off from the controller: neither its session nor probes pass."""
    draining: bool = False
    session: int = 0
    known: Federation | None = None
    well_since_s: float = -1e9
    """The time since which it runs, is reached, and takes requests."""
    ill_since_s: float | None = None
    """The time since which it does not run, is frozen, cut off or draining."""

    @property
    def reached(self) -> bool:
        return self.runs and not self.frozen and not self.cut

    @property
    def well(self) -> bool:
        return self.reached and not self.draining


@dataclass
class World:
    seed: int
    now_s: float = 100.0
    lbs: dict[str, Lb] = field(default_factory=dict)
    changes: dict[tuple[str, str], list[tuple[float, str]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)
        regions = REGIONS[: self.draw.randint(2, 4)]
        rules = tuple(
            Rule((region,), tuple(self.draw.sample(regions, self.draw.randint(1, len(regions)))))
            for region in regions
            if self.draw.random() < 0.3
        )
        self.geography = Geography(rules=rules)
        self.table = {
            (one, other): self.draw.choice((10.0, 20.0, 20.0, 90.0))
            for place, one in enumerate(regions)
            for other in regions[place + 1 :]
        }
        self.boots = 0
        for region in regions:
            for number in range(self.draw.choice((1, 1, 2))):
                owned = (OwnedCluster(region, f"{region}:1"),)
                self.lbs[f"{region}{number}"] = Lb(
                    LbInfo(f"{region}{number}", "boot0", region, f"{region}:2", clusters=owned)
                )
        self.start_controller(None)

    def start_controller(self, file: Federation | None) -> None:
        self.started_s = self.now_s
        epoch = file.epoch if file else f"epoch{self.boots}"
        self.boots += 1
        self.registry = LbRegistry(epoch, self.now_s, TIMING, self.geography, self.table)
        if file is not None:
            self.registry.recover(file, self.now_s)
        for lb in self.lbs.values():
            lb.session = 0

    def act(self) -> None:
        """Causes one event at a random load balancer."""
        lb = self.lbs[self.draw.choice(sorted(self.lbs))]
        what = self.draw.choice(
            ("kill", "kill", "freeze", "cut", "drain", "heal", "heal", "heal", "leave", "controller")
        )
        if what == "kill":
            lb.runs = False
            self.lose(lb)
        elif what == "freeze":
            lb.frozen = True
        elif what == "cut":
            lb.cut = True
            self.lose(lb)
        elif what == "drain":
            lb.draining = not lb.draining
        elif what == "leave" and lb.reached:
            self.registry.left(lb.session, self.now_s)
            lb.runs, lb.session = False, 0
        elif what == "controller":
            self.start_controller(self.registry.federation if self.draw.random() < 0.7 else None)
        elif what == "heal":
            self.heal(lb)

    def lose(self, lb: Lb) -> None:
        """Ends the load balancer's session."""
        self.registry.lost(lb.session, self.now_s)
        lb.session = 0

    def heal(self, lb: Lb) -> None:
        if not lb.runs:
            self.boots += 1
            lb.info = replace(lb.info, boot_id=f"boot{self.boots}")
            lb.draining, lb.known = False, None
        lb.runs, lb.frozen, lb.cut = True, False, False

    def tick(self) -> None:
        self.now_s += TICK_S
        registry = self.registry
        for lb in self.lbs.values():
            if lb.reached:
                if not lb.session:
                    lb.session = registry.register(lb.info, self.now_s)
                    if lb.known is not None and registry.settling(self.now_s):
                        registry.recover(lb.known, self.now_s)
                assert registry.heard(lb.session, None, {}, lb.draining, self.now_s)
            elif not (lb.runs and lb.frozen and not lb.cut):
                self.lose(lb)  # a frozen one keeps its connection
        for member in list(registry.watched()):
            lb = self.lbs[member.info.lb_id]
            if member.suspected(self.now_s, TIMING):
                began_s = self.now_s - self.draw.choice((0.0, TICK_S))
                registry.probed(lb.info.lb_id, member.info.boot_id, lb.reached, began_s, self.now_s)
        registry.sweep(self.now_s)
        for lb in self.lbs.values():
            if lb.reached:
                lb.known = registry.federation
            if lb.well:
                lb.ill_since_s = None
            else:
                lb.well_since_s = self.now_s
                lb.ill_since_s = self.now_s if lb.ill_since_s is None else lb.ill_since_s
        self.look()

    def ill_for_s(self, lb_id: str) -> float:
        since_s = self.lbs[lb_id].ill_since_s
        return 0.0 if since_s is None else self.now_s - max(since_s, self.started_s)

    def well_for_s(self, lb_id: str) -> float:
        return self.now_s - max(self.lbs[lb_id].well_since_s, self.started_s)

    def look(self) -> None:
        """Checks what must hold at any time."""
        federation = self.registry.federation
        states = {member.info.lb_id: member.state for member in federation.members}
        patience_s = max(DETECT_S, TIMING.grace_s + TICK_S)
        for cluster in federation.clusters:
            adopter = cluster.adopter
            seen = self.changes.setdefault(cluster.key, [])
            if not seen or seen[-1][1] != adopter:
                seen.append((self.now_s, adopter))
            if adopter:
                lb = self.lbs[adopter]
                assert adopter not in cluster.owners
                assert states[adopter] is LbState.LIVE
                assert self.geography.sends(cluster.region, lb.info.region).allowed, "law is above all"
                assert self.ill_for_s(adopter) <= patience_s + TIMING.lease_s, "nothing stays with who is dead"
            well_owner_s = max(self.well_for_s(owner) for owner in cluster.owners)
            if well_owner_s > TIMING.settle_max_s + TICK_S:
                assert not adopter, "handed back"
            could = [
                lb_id
                for lb_id, lb in self.lbs.items()
                if lb_id not in cluster.owners
                and self.geography.sends(cluster.region, lb.info.region).allowed
                and self.well_for_s(lb_id) > patience_s + TIMING.lease_s
            ]
            ill = min(self.ill_for_s(owner) for owner in cluster.owners)
            if could and ill > patience_s + TIMING.lease_s:
                assert adopter, f"{cluster.key} is served by nobody"


@pytest.mark.parametrize("block", range(10))
def test_worlds_where_anything_happens(block):
    for seed in range(block * SEEDS, (block + 1) * SEEDS):
        print("seed", seed)
        world = World(seed)
        for _ in range(240):
            if world.draw.random() < 0.12:
                world.act()
            world.tick()
        for lb in world.lbs.values():  # everything works again
            world.heal(lb)
            lb.draining = False
        for _ in range(round((TIMING.settle_max_s + 2) / TICK_S)):
            world.tick()
        assert all(not cluster.adopter for cluster in world.registry.federation.clusters)
        assert all(member.state is LbState.LIVE for member in world.registry.federation.members)


@pytest.mark.parametrize("seed", range(usually(4, long=40)))
def test_an_owner_that_comes_and_goes_moves_little(seed):
    """The cluster of a flapping owner moves only as often as doubling pauses allow."""
    world = World(seed)
    world.geography = Geography()
    world.start_controller(None)
    world.tick()
    owners = [lb for lb in world.lbs.values() if lb.info.region == "a"]
    world.changes.clear()
    for _ in range(2000):
        for lb in owners:
            if world.draw.random() < 0.15:
                lb.frozen = not lb.frozen
        world.tick()
    (changes,) = [each for key, each in world.changes.items() if key[0] == "a"]
    adopters = {adopter for _, adopter in changes if adopter}
    returns = [when_s for when_s, adopter in changes[1:] if not adopter]
    assert len(adopters) == 1, "nobody closer takes it over from who has it"
    # Each return needs a hold after the failures before it: 2, 4, 8, 16, 16 … seconds.
    assert len(returns) <= 4 + 2000 * TICK_S / TIMING.settle_max_s


# ---------------------------------------------------------------- names and boots


def test_a_boot_that_was_replaced_does_not_come_back():
    registry = LbRegistry("e", 0.0)
    old, new = LbInfo("x", "1", "a", "x:1"), LbInfo("x", "2", "a", "x:1")
    first = registry.register(old, 0.0)
    second = registry.register(new, 1.0)
    assert not registry.heard(first, "9 wait", {}, False, 2.0), "what an older boot says is void"
    registry.lost(first, 2.0)
    registry.left(first, 2.0)
    assert registry.heard(second, "1 waits", {}, False, 2.0)
    with pytest.raises(FailedPrecondition):
        registry.register(old, 3.0)
    later = LbRegistry("e", 10.0)
    later.recover(registry.federation, 10.0)
    with pytest.raises(FailedPrecondition):
        later.register(old, 10.0)
    (member,) = registry.federation.members
    assert member.info.boot_id == "2"
    assert member.connected
