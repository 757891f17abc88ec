"""Takeover: which load balancer serves the instances of one that does not (SkyWalker §4.2).

Each *cluster* is served by its owners while one of them serves; else by the closest load balancer that may, one alone.
An adopter keeps a cluster until an owner has served for a while, or until it does not serve itself. A closer load
balancer that comes back later changes nothing, and an owner that comes and goes moves nothing about."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pinyon.federation.view import ClusterName


@dataclass(frozen=True, slots=True)
class Standing:
    """A load balancer as this decision sees it."""

    lb_id: str
    region: str
    serves: bool
    """True if it lives, and takes new requests."""
    steady: bool
    """True if it has done so for long enough to get its own clusters back."""
    hears: bool
    """True if it has a session, and so would learn that it is to adopt something."""
    keeps: bool
    """True if it goes on with what it was told: it hears, has heard lately, or nobody knows yet."""


def assign(
    clusters: Sequence[tuple[ClusterName, tuple[str, ...]]],
    standings: Mapping[str, Standing],
    adoptions: Mapping[ClusterName, str],
    sends: Callable[[str, str], bool],
    distance_ms: Callable[[str, str], float],
) -> dict[ClusterName, str]:
    """Returns the adopter of each cluster from now on.

    ``clusters``: each with the ids of its owners; ``adoptions``: the present adopters. ``sends(region, other)``:
    whether law lets requests of ``region`` be served by a load balancer of ``other``. Among equally close ones, the one
    with the fewest adoptions adopts, then the first by id."""
    kept: dict[ClusterName, str] = {}
    orphans: list[tuple[ClusterName, tuple[str, ...]]] = []
    last: dict[ClusterName, str] = {}
    """Orphans of adopters that have not been heard for a while: better than none."""
    counts: Counter[str] = Counter()
    for key, owners in clusters:
        serving = [standings[owner] for owner in owners if owner in standings and standings[owner].serves]
        if any(owner.steady for owner in serving):
            continue
        present = standings.get(adoptions.get(key, ""))
        may = present is not None and present.serves and present.lb_id not in owners and sends(key[0], present.region)
        if present is not None and may and present.keeps:
            kept[key] = present.lb_id
            counts[present.lb_id] += 1
        elif not serving:
            orphans.append((key, owners))
            if present is not None and may:
                last[key] = present.lb_id
    for key, owners in sorted(orphans):
        ranks = [
            (not each.steady, distance_ms(key[0], each.region), counts[lb_id], lb_id)
            for lb_id, each in standings.items()
            if each.serves and each.hears and lb_id not in owners and sends(key[0], each.region)
        ]
        if ranks:
            kept[key] = min(ranks)[3]
            counts[kept[key]] += 1
        elif key in last:
            kept[key] = last[key]
    return kept
