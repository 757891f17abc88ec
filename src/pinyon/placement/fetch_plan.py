"""Which source each missing block is fetched from."""

from __future__ import annotations

from functools import lru_cache

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
    host, after = _host(reader.info.address), reader.row + 1

    def preference(state: InstanceState) -> tuple[bool, bool, int, int]:
        elsewhere = not host or _host(state.info.address) != host
        return state.info.role is not Role.STORE, elsewhere, state.inflight_reads, (state.row - after) % ROWS_MAX

    spans = match.spans_for(reader, first_block, end_block, pool.sources_for(reader))
    return tuple(Fetch(min(holders, key=preference), first, end - first) for first, end, holders in spans)


@lru_cache(4096)
def _host(address: str) -> str:
    """Empty: nobody knows."""
    return address.rpartition(":")[0]
