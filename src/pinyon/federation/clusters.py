"""The clusters that load balancers own, put together: several of a region that name one cluster share it."""

from __future__ import annotations

from collections.abc import Iterable

from pinyon.federation.changes import Changes, is_upstream
from pinyon.federation.members import OwnedCluster
from pinyon.federation.view import Cluster, ClusterName, Federation
from pinyon.federation.watched import Watched


def owners_of(members: Iterable[Watched]) -> dict[ClusterName, list[Watched]]:
    """Returns the owners of each cluster, in order of names and ids."""
    owners: dict[ClusterName, list[Watched]] = {}
    for member in sorted(members, key=lambda each: each.info.lb_id):
        for cluster in member.info.clusters:
            owners.setdefault((member.info.region, cluster.name), []).append(member)
    return dict(sorted(owners.items()))


def cluster_of(key: ClusterName, owners: list[Watched], changes: Changes, adopter: str) -> Cluster:
    """Returns the cluster as its serving owners describe it, or all owners where none serves.

    The owner that registered last says of what kind it is.
    """
    asked = sorted([each for each in owners if each.serves] or owners, key=lambda each: each.registered)
    said = [cluster for member in asked for cluster in member.info.clusters if cluster.name == key[1]]
    conductor = said[-1].conductor
    added, removed = changes.added(key), changes.removed(key)
    upstreams: dict[str, None] = {}
    if not conductor:
        for each in said:
            upstreams.update(dict.fromkeys(each.upstreams))
        upstreams.update(dict.fromkeys(added))
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
