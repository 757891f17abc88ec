"""The clusters that load balancers own, merged: load balancers of a region that name the same cluster share it.

People can also add instances to clusters and remove them, besides those that load balancers name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from pinyon.core.errors import FailedPrecondition, ResourceExhausted
from pinyon.federation.view import Cluster, ClusterName, Federation, OwnedCluster
from pinyon.federation.watched import WatchedBalancer

CHANGES_MAX = 1024
"""The maximum number of changes of one cluster, of either kind."""


def is_upstream(instance: str) -> bool:
    """Returns whether an instance is an upstream, given by a base URL; otherwise it is the id of a worker."""
    return "://" in instance


@dataclass(slots=True, eq=False)
class Changes:
    """The changes that people made to a cluster. The last word on an instance counts."""

    added: dict[str, None] = field(default_factory=dict)
    removed: dict[str, None] = field(default_factory=dict)
    _recovered: set[str] = field(default_factory=set)
    """Instances whose only known change comes from the last recovery."""

    def add(self, instance: str) -> bool:
        """Adds an instance; True if it is news. Raises :class:`FailedPrecondition` for a worker not removed."""
        self._recovered.discard(instance)
        if instance in self.removed:
            del self.removed[instance]
            return True
        if not is_upstream(instance):
            raise FailedPrecondition(
                f"{instance} was not removed; workers register with their conductor by themselves", field="instance"
            )
        return _put(self.added, instance)

    def remove(self, instance: str) -> bool:
        """Removes an instance; returns whether this is news."""
        self._recovered.discard(instance)
        self.added.pop(instance, None)
        return _put(self.removed, instance)

    def recover(self, added: Iterable[str], removed: Iterable[str], *, replaces: bool) -> None:
        """Restores earlier changes, except of instances changed since, and as far as there is room.

        ``replaces``: these changes are later than those recovered last, and replace them."""
        for instance in self._recovered if replaces else ():
            self.added.pop(instance, None)
            self.removed.pop(instance, None)
        self._recovered.clear()
        said = {*self.added, *self.removed}
        for known, before in ((self.added, added), (self.removed, removed)):
            for instance in before:
                if instance not in said and len(known) < CHANGES_MAX:
                    _put(known, instance)
                    self._recovered.add(instance)


NO_CHANGES: Final = Changes()


def _put(instances: dict[str, None], instance: str) -> bool:
    if instance in instances:
        return False
    if len(instances) >= CHANGES_MAX:
        raise ResourceExhausted(f"{CHANGES_MAX} instances of the cluster were added or removed already")
    instances[instance] = None
    return True


def owners_of(members: Iterable[WatchedBalancer]) -> dict[ClusterName, list[WatchedBalancer]]:
    """Returns the owners of each cluster, in order of names and ids."""
    owners: dict[ClusterName, list[WatchedBalancer]] = {}
    for member in sorted(members, key=lambda each: each.info.lb_id):
        for cluster in member.info.clusters:
            owners.setdefault((member.info.region, cluster.name), []).append(member)
    return dict(sorted(owners.items()))


def cluster_of(key: ClusterName, owners: list[WatchedBalancer], changes: Changes, adopter: str) -> Cluster:
    """Returns the cluster as its serving owners describe it, or as all owners do if none serves.

    The owner that registered last determines the kind of cluster."""
    asked = sorted([each for each in owners if each.serves] or owners, key=lambda each: each.registered)
    said = [cluster for member in asked for cluster in member.info.clusters if cluster.name == key[1]]
    conductor = said[-1].conductor
    upstreams = () if conductor else dict.fromkeys((*[url for each in said for url in each.upstreams], *changes.added))
    return Cluster(
        region=key[0],
        name=key[1],
        conductor=conductor,
        upstreams=tuple([each for each in upstreams if each not in changes.removed]),
        removed=tuple(changes.removed),
        added=tuple(changes.added),
        owners=tuple([each.info.lb_id for each in owners]),
        adopter=adopter,
    )


def owned_before(known: Federation) -> dict[str, list[OwnedCluster]]:
    """Returns the clusters that each load balancer owned when ``known`` was told."""
    owned: dict[str, list[OwnedCluster]] = {}
    for cluster in known.clusters:
        reported = dict.fromkeys((*cluster.upstreams, *[each for each in cluster.removed if is_upstream(each)]))
        upstreams = () if cluster.conductor else tuple([each for each in reported if each not in cluster.added])
        for owner in cluster.owners:
            owned.setdefault(owner, []).append(OwnedCluster(cluster.name, cluster.conductor, upstreams))
    return owned
