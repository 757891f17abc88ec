"""Which source each missing block is fetched from."""

from __future__ import annotations

from pinyon.core.request import Role
from pinyon.placement.instances import InstanceState
from pinyon.placement.policy import Fetch, Pool
from pinyon.placement.prefix_match import PrefixMatch

__all__ = ["plan_fetches"]

ROWS_MAX = 1 << 32
"""More than there are: a number below it for each distance of two rows."""


def plan_fetches(
    pool: Pool, match: PrefixMatch, reader: InstanceState, first_block: int, end_block: int
) -> tuple[Fetch, ...]:
    """What ``reader`` fetches of ``[first_block, end_block)``, in order, each span from one of the pool's other sources
    that holds all of it. Requires ``end_block <= match.extent_for(reader, first_block, pool.sources_for(reader),
    spans_max)``.

    From each position the source that goes furthest is taken, which gives the fewest spans. Among equals a store node
    is preferred (it runs no requests), then one on the reader's own host (nothing goes over the network), then the one
    with the fewest blocks being read, then the next one after the reader; so readers of a hot prefix spread over its
    replicas on store nodes, or else over its peers.
    """
    host, after = _host(reader), reader.row + 1

    def preference(state: InstanceState) -> tuple[bool, bool, int, int]:
        store = state.info.role is Role.STORE
        return not store, _host(state) != host, state.inflight_reads, (state.row - after) % ROWS_MAX

    spans = match.spans_for(reader, first_block, end_block, pool.sources_for(reader))
    return tuple(Fetch(min(holders, key=preference), first, end - first) for first, end, holders in spans)


def _host(state: InstanceState) -> str:
    return state.info.address.rpartition(":")[0]
