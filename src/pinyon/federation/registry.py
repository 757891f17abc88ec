"""The registry: regions, load balancers, their clusters, and the adopters of orphaned clusters (SkyWalker §4.2).

Callers tell it everything that happens, with the time; ``sweep`` decides what follows. Its :class:`Federation` has a
version that grows with each change; load and heartbeats do not change it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from pinyon.core.errors import FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted
from pinyon.federation.clusters import NO_CHANGES, Changes, cluster_of, is_upstream, owned_before, owners_of
from pinyon.federation.distances import Distances, Pair, Position
from pinyon.federation.takeover import assign
from pinyon.federation.view import Cluster, ClusterName, Federation, LbInfo, LbState, Member, RegionView
from pinyon.federation.watched import Timing, WatchedBalancer
from pinyon.routing.geography import Geography

MEMBERS_MAX = 256
UPSTREAMS_MAX = 8192
"""The maximum number of upstreams of all clusters together: the federation must fit one message."""
LATENCIES_MAX = 256
RECOVERED_MAX = 1024
"""The maximum number of clusters whose earlier state their owners have told."""
VERSION_JUMP = 1 << 20
"""The addition to the version after a restart: the last versions sent out may not have reached the disk."""
VERSION_MAX = 1 << 52
"""A version that no memory reaches in practice; beyond it, a new memory begins."""


class LbRegistry:
    """The registry. ``geography`` and ``table`` (distances in milliseconds) may be replaced at any time."""

    def __init__(
        self,
        epoch: str,
        started_s: float,
        timing: Timing | None = None,
        geography: Geography | None = None,
        table: Mapping[Pair, float] | None = None,
        members_max: int = MEMBERS_MAX,
    ) -> None:
        self.timing = timing or Timing()
        self.geography = geography or Geography()
        self.table: Mapping[Pair, float] = table or {}
        self._members_max = members_max
        self._started_s = started_s
        self._members: dict[str, WatchedBalancer] = {}
        self._changes: dict[ClusterName, Changes] = {}
        self._adoptions: dict[ClusterName, str] = {}
        self._recovered: dict[ClusterName, tuple[str, int]] = {}
        """Epoch and version of each cluster's last news from before this controller's start, by file or owner."""
        self._serial = 0
        self.federation = Federation(epoch)
        """The federation as of the last ``sweep``, registration or change."""
        self.takeovers = 0
        """The number of clusters that were adopted since this controller's start."""
        self.handbacks = 0
        """The number of clusters that their owners got back."""
        self.failures = 0

    # -- present knowledge

    def watched(self) -> Iterable[WatchedBalancer]:
        """Returns all load balancers."""
        return self._members.values()

    def settling(self, now_s: float) -> bool:
        """Returns whether the controller has just started, so that load balancers it has not heard may be alive."""
        return now_s < self._started_s + self.timing.grace_s

    def distances(self) -> Distances:
        """Returns the distances between regions, from everything that is known."""
        measured: dict[Pair, list[float]] = {}
        for member in self._members.values():
            here = member.info.region
            for lb_id, latency_ms in member.latencies_ms.items():
                other = self._members.get(lb_id)
                if other is not None and other.info.region != here:
                    there = other.info.region
                    measured.setdefault((here, there) if here < there else (there, here), []).append(latency_ms)
        return Distances({pair: tuple(each) for pair, each in measured.items()}, self.table, self._positions())

    # -- sessions

    def register(self, info: LbInfo, now_s: float) -> int:
        """Begins a session and returns its number; an earlier session of the load balancer is void from now on.

        Raises :class:`FailedPrecondition` for a boot whose name a newer boot has taken, and :class:`ResourceExhausted`
        when there are too many load balancers."""
        known = self._members.get(info.lb_id)
        if known is not None and info.boot_id in known.displaced:
            raise FailedPrecondition(f"a newer process is {info.lb_id}", field="registration.boot_id")
        if known is not None and known.info.region != info.region and known.serves:
            raise FailedPrecondition(
                f"{info.lb_id} is in {known.info.region}: ids are unique over all regions", field="registration.lb_id"
            )
        self._make_room(info, known)
        self._serial += 1
        if known is None:
            known = self._members[info.lb_id] = WatchedBalancer(info, self._serial, lost_s=now_s)
        known.register(info, self._serial, self._serial, now_s)
        self._publish()
        return self._serial

    def update(self, session: int, info: LbInfo) -> None:
        """Records new facts from a load balancer with a session. Raises as :meth:`register`, and if its id changes."""
        member = self._of(session)
        if member is None:
            return
        if (info.lb_id, info.boot_id, info.region) != (member.info.lb_id, member.info.boot_id, member.info.region):
            raise InvalidArgument("its ids and its region stay in a session", field="registration")
        self._make_room(info, member)
        self._serial += 1
        member.info, member.registered = info, self._serial
        self._publish()

    def heard(self, session: int, load: Any, latencies_ms: Mapping[str, float], draining: bool, now_s: float) -> bool:
        """Records a report, with ``load`` if it is not None. Returns False if the session is void."""
        member = self._of(session)
        if member is None:
            return False
        member.heard(now_s)
        member.drains(draining, now_s)
        if load is not None:
            member.load = load
        member.measured(latencies_ms, LATENCIES_MAX)
        return True

    def awaits(self, session: int, draining: bool) -> bool:
        """Returns whether the report may change who serves what: a failed load balancer speaks, or draining changes."""
        member = self._of(session)
        return member is not None and (member.failed or member.draining != draining)

    def has_failed(self, lb_id: str) -> bool:
        member = self._members.get(lb_id)
        return member is not None and member.failed

    def left(self, session: int, now_s: float) -> None:
        """Records that a load balancer left in good order."""
        member = self._of(session)
        if member is not None:
            member.leave(now_s)

    def lost(self, session: int, now_s: float) -> None:
        """Records that a session ended, for whatever reason; does nothing for a void one."""
        member = self._of(session)
        if member is not None:
            member.session, member.lost_s = 0, now_s

    def probed(self, lb_id: str, boot_id: str, answered: bool, began_s: float, now_s: float) -> None:
        """Records the end of a probe of the load balancer's address; the probe began at ``began_s``."""
        member = self._members.get(lb_id)
        if member is None or member.left or member.info.boot_id != boot_id:
            return
        if answered:
            member.answered(now_s)
        else:
            member.silent(began_s, self.timing)

    def stood_still(self, late_s: float) -> None:
        """Excuses silence during ``late_s`` in which this process stood still: load balancers may have spoken."""
        for member in self._members.values():
            member.heard_s += late_s
            member.failed_probes = 0

    def sweep(self, now_s: float) -> list[LbInfo]:
        """Decides what follows from the passing of time. Returns the load balancers that have just failed."""
        failed = [each.info for each in self._members.values() if each.look(now_s, self._started_s, self.timing)]
        self.failures += len(failed)
        standings = {lb_id: each.standing(now_s, self.timing) for lb_id, each in self._members.items()}
        clusters = [(key, tuple([each.info.lb_id for each in owners])) for key, owners in self._owners().items()]
        before = self._adoptions
        distances = cache(self.distances)  # computed once, and only if needed
        self._adoptions = assign(
            clusters,
            standings,
            before,
            lambda one, other: self.geography.sends(one, other).allowed,
            lambda one, other: distances().ms(one, other),
        )
        self.takeovers += sum([before.get(key) != lb_id for key, lb_id in self._adoptions.items()])
        for key, owners in clusters:
            if key in before and key not in self._adoptions:
                self.handbacks += any(standings[owner].serves for owner in owners)
        self._publish()
        return failed

    # -- changes by hand

    def add_instance(self, region: str, cluster: str, instance: str) -> bool:
        """Adds an instance to a cluster; returns whether this is news. Raises :class:`PinyonError` if it cannot."""
        key = self._named(region, cluster)
        known = self._cluster(key, self._owners()[key])
        if is_upstream(instance) and known.conductor:
            raise FailedPrecondition(
                "its workers register with their conductor, which has no upstreams", field="instance"
            )
        if is_upstream(instance) and self._upstreams() >= UPSTREAMS_MAX:
            raise ResourceExhausted(f"there are {UPSTREAMS_MAX} upstreams")
        changed = self._changes.setdefault(key, Changes()).add(instance)
        self._publish()
        return changed

    def remove_instance(self, region: str, cluster: str, instance: str) -> bool:
        """Removes an instance from a cluster; returns and raises as :meth:`add_instance`."""
        changed = self._changes.setdefault(self._named(region, cluster), Changes()).remove(instance)
        self._publish()
        return changed

    def forget(self, lb_id: str) -> None:
        """Forgets a load balancer. Raises :class:`NotFound`, and :class:`FailedPrecondition` while it lives."""
        member = self._members.get(lb_id)
        if member is None:
            raise NotFound(f"there is no load balancer {lb_id}", field="lb_id")
        if member.state in (LbState.LIVE, LbState.DRAINING):
            raise FailedPrecondition(f"{lb_id} is {member.state.value}", field="lb_id")
        self._drop(lb_id)
        self._publish()

    # -- memory

    def recover(self, known: Federation, now_s: float, by: LbInfo | None = None) -> None:
        """Restores the state from before this controller started; what has been heard since takes precedence.

        The source is the controller's file or, if that is lost, what the load balancer ``by`` was told. The load
        balancer is believed about instances that people added or removed only in its own clusters. About other load
        balancers it may tell their identity, their adoptions, and their conductors, which prove that they belong to the
        suite. It may not tell other owners' upstream servers, nor which processes may no longer register."""
        owned = owned_before(known)
        adopted: set[str] = set()
        for cluster in known.clusters:
            epoch, version = self._recovered.get(cluster.key, ("", 0))
            if by is None or self._speaks_for(by, cluster.key, known):
                later = epoch == known.epoch and version < known.version
                self._recovered[cluster.key] = known.epoch, known.version
                changes = self._changes.setdefault(cluster.key, Changes())
                changes.recover(cluster.added, cluster.removed, replaces=later)
            if cluster.adopter:
                self._adoptions.setdefault(cluster.key, cluster.adopter)
                adopted.update(cluster.owners)
        for each in known.members:
            lb_id = each.info.lb_id
            if by is not None and each.info.boot_id == by.boot_id and lb_id == by.lb_id in self._members:
                self._members[lb_id].displaces(each.displaced)
            if lb_id in self._members or len(self._members) >= self._members_max:
                continue
            self._serial += 1
            away = each.state is not LbState.LIVE or lb_id in adopted
            clusters = [cluster for cluster in owned.get(lb_id, ()) if by is None or cluster.conductor]
            self._members[lb_id] = WatchedBalancer(
                replace(each.info, clusters=tuple(clusters)),
                self._serial,
                lost_s=now_s,
                up_s=now_s,
                downs=int(away),
                failed=each.state is LbState.FAILED,
                left=each.state is LbState.LEFT,
                draining=each.state is LbState.DRAINING,
                hearsay=by is not None,
                displaced=each.displaced if by is None else (),
            )
        version = self.federation.version
        if by is None and known.epoch == self.federation.epoch:
            version = max(version, known.version + VERSION_JUMP)
        self.federation = replace(self.federation, version=version)
        self._publish()

    def renew(self, epoch: str) -> None:
        """Gives this memory a new epoch and publishes it, as a load balancer knows a later version of the old one."""
        self.federation = replace(self.federation, epoch=epoch, version=self.federation.version + 1)

    # -- helpers

    def _speaks_for(self, info: LbInfo, key: ClusterName, known: Federation) -> bool:
        """Returns whether ``info`` owns the cluster, and no owner has told a later version of the same memory."""
        if key not in [(info.region, cluster.name) for cluster in info.clusters]:
            return False
        epoch, version = self._recovered.get(key, ("", 0))
        if epoch == known.epoch and version >= known.version:
            return False
        return key in self._recovered or len(self._recovered) < RECOVERED_MAX

    def _of(self, session: int) -> WatchedBalancer | None:
        return next((member for member in self._members.values() if member.session == session), None)

    def _positions(self) -> dict[str, Position]:
        """Returns the positions of regions, for each as the latest registration says."""
        members = self._by_registration()
        return {each.info.region: each.info.position for each in members if each.info.position is not None}

    def _by_registration(self) -> list[WatchedBalancer]:
        return sorted(self._members.values(), key=lambda member: member.registered)

    def _make_room(self, info: LbInfo, known: WatchedBalancer | None) -> None:
        before = 0 if known is None else _upstreams_of(known.info)
        if self._upstreams() - before + _upstreams_of(info) > UPSTREAMS_MAX:
            raise ResourceExhausted(f"at most {UPSTREAMS_MAX} upstreams in all")
        if known is not None or len(self._members) < self._members_max:
            return
        known_only = [each for each in self._by_registration() if not each.session]
        # First those that left; then those never heard, of which only others have told.
        gone = [each for each in known_only if each.left] + [each for each in known_only if each.hearsay]
        if not gone:
            raise ResourceExhausted(f"{len(self._members)} load balancers are known; see pinyon regions forget")
        self._drop(gone[0].info.lb_id)

    def _drop(self, lb_id: str) -> None:
        before = set(self._owners())
        del self._members[lb_id]
        for key in before - set(self._owners()):
            self._changes.pop(key, None)
            self._adoptions.pop(key, None)
            self._recovered.pop(key, None)
        for member in self._members.values():
            member.latencies_ms.pop(lb_id, None)

    def _upstreams(self) -> int:
        owners = self._owners()
        added = sum([len(changes.added) for key, changes in self._changes.items() if key in owners])
        return added + sum([_upstreams_of(each.info) for each in self._members.values()])

    def _owners(self) -> dict[ClusterName, list[WatchedBalancer]]:
        return owners_of(self._members.values())

    def _cluster(self, key: ClusterName, owners: list[WatchedBalancer]) -> Cluster:
        return cluster_of(key, owners, self._changes.get(key, NO_CHANGES), self._adoptions.get(key, ""))

    def _named(self, region: str, cluster: str) -> ClusterName:
        names = [name for of, name in self._owners() if of == region]
        if not names:
            raise NotFound(f"there is no cluster in region {region!r}", field="region")
        if cluster in names:
            return region, cluster
        if cluster or len(names) > 1:
            raise InvalidArgument(f"clusters of {region} are {', '.join(names)}", field="cluster")
        return region, names[0]

    def _publish(self) -> None:
        """Publishes a new version if anything has changed."""
        tags = self.geography.tags
        positions = self._positions()
        regions = sorted({each.info.region for each in self._members.values()})
        view = replace(
            self.federation,
            regions=tuple([RegionView(name, tuple(tags.get(name, ())), positions.get(name)) for name in regions]),
            members=tuple(
                [
                    Member(replace(each.info, clusters=()), each.state, bool(each.session), each.displaced)
                    for _, each in sorted(self._members.items())
                ]
            ),
            clusters=tuple([self._cluster(key, owners) for key, owners in self._owners().items()]),
        )
        if view != self.federation:
            self.federation = replace(view, version=self.federation.version + 1)


def _upstreams_of(info: LbInfo) -> int:
    return sum([len(cluster.upstreams) for cluster in info.clusters])
