"""Which source each missing block is fetched from."""

from __future__ import annotations

from pinyon.core.request import Role
from pinyon.placement.instances import InstanceState
from pinyon.placement.policy import Fetch, Pool
from pinyon.placement.prefix_match import PrefixMatch

__all__ = ["plan_fetches"]


def plan_fetches(
    pool: Pool, match: PrefixMatch, reader: InstanceState, first_block: int, end_block: int
) -> tuple[Fetch, ...]:
    """What ``reader`` fetches of ``[first_block, end_block)``, in order, each span from one of the pool's other sources
    that holds all of it. Requires ``end_block <= match.extent_for(reader, first_block, pool.sources_for(reader),
    spans_max)``.

    From each position the source that goes furthest is taken, which gives the fewest spans. Among equals a store node
    is preferred (it runs no requests), then the one with the fewest blocks being read, then the smaller id; so readers
    of a hot prefix spread over its replicas on store nodes, or else over its peers.
    """
    spans = match.spans_for(reader, first_block, end_block, pool.sources_for(reader))
    return tuple(Fetch(min(holders, key=_preference), first, end - first) for first, end, holders in spans)


def _preference(state: InstanceState) -> tuple[bool, int, str]:
    return (state.info.role is not Role.STORE, state.inflight_reads, state.info.instance_id)
