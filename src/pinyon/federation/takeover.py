"""Takeover: which load balancer serves the instances of a load balancer that does not serve (SkyWalker §4.2).

Each *cluster* is served by its owners while one of them serves; otherwise, by the closest single load balancer that
may. An adopter keeps a cluster until an owner has served for a while, or until the adopter itself no longer serves. A
closer load balancer that comes back later changes nothing, and an owner that comes and goes moves nothing about."""

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
    """True if it has served for long enough to get its own clusters back."""
    hears: bool
    """True if it has a session, and so would learn that it is to adopt something."""
    keeps: bool
    """True if it still follows what it was told: it has a session, lost it only lately, or its state is unknown."""


def assign(
    clusters: Sequence[tuple[ClusterName, tuple[str, ...]]],
    standings: Mapping[str, Standing],
    adoptions: Mapping[ClusterName, str],
    sends: Callable[[str, str], bool],
    distance_ms: Callable[[str, str], float],
) -> dict[ClusterName, str]:
    """Returns the adopter of each cluster from now on.

    ``clusters``: each with the ids of its owners; ``adoptions``: the present adopters. ``sends(region, other)``:
    whether law lets a load balancer of ``other`` serve requests of ``region``. Among equally close ones, the one with
    the fewest adoptions adopts, then the first by id."""
    kept: dict[ClusterName, str] = {}
    orphans: list[tuple[ClusterName, tuple[str, ...]]] = []
    last: dict[ClusterName, str] = {}
    """The present adopters of orphans, not heard for a while: they keep the cluster if no other can adopt it."""
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
