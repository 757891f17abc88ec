"""Which source each missing block is fetched from."""

from __future__ import annotations

from pinyon.placement.index import PrefixMatch, bits
from pinyon.placement.instances import InstanceRole, InstanceState
from pinyon.placement.policy import FetchSpan, Pool

__all__ = ["plan_fetches"]

SPANS_MAX = 256


def plan_fetches(
    pool: Pool, match: PrefixMatch, first_block: int, end_block: int, sources: int
) -> tuple[FetchSpan, ...]:
    """Spans that cover ``[first_block, end_block)`` in order, each from an instance in the mask ``sources`` that holds
    all of it. Requires ``end_block <= match.extent(first_block, sources)``.

    From each position the source that goes furthest is taken, which gives the fewest spans. Among equals a store node
    is preferred (it runs no requests), then the one with the fewest blocks being read, then the smaller id; so readers
    of a hot prefix spread over its replicas. At most 256 spans: what lies behind them is computed.
    """
    spans: list[FetchSpan] = []
    runs = match.runs
    index = 0
    at = first_block
    while at < end_block and len(spans) < SPANS_MAX:
        while index + 1 < len(runs) and runs[index + 1][0] <= at:
            index += 1
        holders = runs[index][1] & sources
        end = end_block
        for start, mask in runs[index + 1 :]:
            if start >= end_block:
                break
            narrowed = holders & mask
            if not narrowed:
                end = start
                break
            holders = narrowed
        source = min((pool.by_bit[bit] for bit in bits(holders)), key=_preference)
        spans.append(FetchSpan(source, at, end - at))
        at = end
    return tuple(spans)


def _preference(state: InstanceState) -> tuple[bool, int, str]:
    return (state.info.role is not InstanceRole.STORE, state.inflight_reads, state.info.instance_id)
