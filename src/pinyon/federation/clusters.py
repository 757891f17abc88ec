"""The clusters that load balancers own, put together: several of a region that name one cluster share it.

People add instances to clusters and remove them, beside what load balancers say of their own.
"""

from __future__ import annotations

from collections.abc import Iterable

from pinyon.core.errors import FailedPrecondition, ResourceExhausted
from pinyon.federation.view import Cluster, ClusterName, Federation, OwnedCluster
from pinyon.federation.watched import WatchedBalancer

CHANGES_MAX = 1024
"""Changes of one cluster, of either kind."""


def is_upstream(instance: str) -> bool:
    """Returns whether an instance is given by a base URL; else it is the id of a worker."""
    return "://" in instance


class Changes:
    """The changes by hand. The last word on an instance counts."""

    def __init__(self) -> None:
        self._added: dict[ClusterName, dict[str, None]] = {}
        self._removed: dict[ClusterName, dict[str, None]] = {}
        self._recovered: dict[ClusterName, set[str]] = {}
        """Instances of which only the last recovery has said something."""

    def add(self, cluster: ClusterName, instance: str) -> bool:
        """Adds an instance; True if it is news. Raises :class:`FailedPrecondition` for a worker not removed."""
        self._recovered.get(cluster, set()).discard(instance)
        removed = self._removed.get(cluster, {})
        if instance in removed:
            del removed[instance]
            return True
        if not is_upstream(instance):
            raise FailedPrecondition(
                f"{instance} was not removed; workers register with their conductor by themselves", field="instance"
            )
        return _put(self._added.setdefault(cluster, {}), instance)

    def remove(self, cluster: ClusterName, instance: str) -> bool:
        """Removes an instance; returns whether this is news."""
        self._recovered.get(cluster, set()).discard(instance)
        self._added.get(cluster, {}).pop(instance, None)
        return _put(self._removed.setdefault(cluster, {}), instance)

    def recover(self, cluster: ClusterName, added: Iterable[str], removed: Iterable[str], *, replaces: bool) -> None:
        """Restores earlier changes, as far as nothing was said since and there is room for them.

        ``replaces``: they are later than those recovered last, of which nothing is left.
        """
        recovered = self._recovered.pop(cluster, set())
        if replaces:
            for instances in (self._added, self._removed):
                for instance in recovered:
                    instances.get(cluster, {}).pop(instance, None)
        said = {*self.added(cluster), *self.removed(cluster)}
        recovered = self._recovered[cluster] = set()
        for instances, before in ((self._added, added), (self._removed, removed)):
            known = instances.setdefault(cluster, {})
            for instance in before:
                if instance not in said and len(known) < CHANGES_MAX:
                    _put(known, instance)
                    recovered.add(instance)

    def forget(self, cluster: ClusterName) -> None:
        self._added.pop(cluster, None)
        self._removed.pop(cluster, None)
        self._recovered.pop(cluster, None)

    def added(self, cluster: ClusterName) -> tuple[str, ...]:
        return tuple(self._added.get(cluster, ()))

    def removed(self, cluster: ClusterName) -> tuple[str, ...]:
        return tuple(self._removed.get(cluster, ()))


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
    """Returns the cluster as its serving owners describe it, or all owners where none serves.

    The owner that registered last says of what kind it is.
    """
    asked = sorted([each for each in owners if each.serves] or owners, key=lambda each: each.registered)
    said = [cluster for member in asked for cluster in member.info.clusters if cluster.name == key[1]]
    conductor = said[-1].conductor
    added, removed = changes.added(key), changes.removed(key)
    upstreams = () if conductor else dict.fromkeys((*[url for each in said for url in each.upstreams], *added))
    return Cluster(
        region=key[0],
        name=key[1],
        conductor=conductor,
        upstreams=tuple([each for each in upstreams if each not in removed]),
        removed=removed,
        added=added,
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
