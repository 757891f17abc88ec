"""``pinyon simulate-cache``: how much of a trace a cache of some size answers, by eviction policy."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from pinyon.cli.trace_input import add_trace, bar, open_trace, tell_broken
from pinyon.core.errors import InvalidArgument
from pinyon.eviction import EVICTION_POLICIES, Traits
from pinyon.eviction.replay import BELADY, Asked, CacheReplay, replay
from pinyon.paging.replay import TierReplay, replay_tiers

__all__ = ["add_command", "simulate_cache"]

_DESCRIPTION = """\
Replay the requests of a trace, in order of time, through a cache of equal blocks, with the very policies that workers
and store nodes have. A hit is a block of a request's longest leading run that is in the cache. Then all of its blocks
are used or stored, and the policy evicts until the rest fits; the request's own blocks are not spared. Service takes no
time. With --dram it is the books of a worker's two tiers, where they are spared. The last line is one JSON object."""


def add_command(commands: Any) -> None:
    """Register the command with the sub-parsers of the ``pinyon`` command."""
    parser = commands.add_parser(
        "simulate-cache", help="hit ratio of a trace in a cache of some size, by policy", description=_DESCRIPTION
    )
    add_trace(parser)
    parser.add_argument(
        "--policy",
        default="lru",
        help=f"{EVICTION_POLICIES.described}, or {BELADY}, which knows the future (default lru)",
    )
    parser.add_argument("--capacity", type=int, required=True, metavar="BLOCKS", help="blocks of the trace's size")
    parser.add_argument(
        "--dram", type=int, default=0, metavar="BLOCKS", help="a second tier of so many blocks below the capacity"
    )
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON object")
    parser.set_defaults(run=simulate_cache)


def simulate_cache(arguments: argparse.Namespace) -> int:
    """Replay and print. Raises :class:`PinyonError`."""
    if arguments.capacity < 1:
        raise InvalidArgument(f"--capacity must be at least 1, got {arguments.capacity}", field="capacity")
    if arguments.dram < 0:
        raise InvalidArgument(f"--dram must be at least 0, got {arguments.dram}", field="dram")
    choice = arguments.policy
    if choice == BELADY and arguments.dram:
        raise InvalidArgument(f"--dram replays what workers do, and none has {BELADY}", field="policy")
    if choice != BELADY:
        try:
            EVICTION_POLICIES.checked(choice)
        except ValueError as error:
            raise InvalidArgument(f"{error}, {BELADY}", field="policy") from None
    trace = open_trace(arguments)
    with bar("reading", trace.size_bytes) as progress:
        rows = trace.sorted_rows(arguments.limit, progress)
    requests = [Asked(row.blocks, row.time_s, Traits(row.category, row.user)) for row in rows]
    tell_broken(trace)
    with bar("replaying", len(requests)) as progress:
        cache: CacheReplay | TierReplay = (
            replay_tiers(requests, choice, arguments.capacity, arguments.dram, progress)
            if arguments.dram
            else replay(requests, choice, arguments.capacity, progress)
        )
    unique = len({block for asked in requests for block in asked.blocks})
    result = {
        "name": "simulate-cache",
        "policy": choice,
        "capacity_blocks": arguments.capacity,
        "block_tokens": trace.format.block_tokens,
        **cache.result(),
        "unique_blocks": unique,
        "evicted_blocks": cache.evicted,
        "broken_rows": trace.broken,
    }
    if not arguments.json:
        table = Table(box=None, pad_edge=False, show_header=False)
        table.add_row("requests", f"{cache.requests:,}")
        table.add_row("blocks asked for", f"{cache.blocks:,} of {trace.format.block_tokens} tokens, {unique:,} unlike")
        table.add_row("capacity", f"{arguments.capacity:,} blocks, {arguments.capacity / max(1, unique):.1%} of those")
        table.add_row(f"hits with {choice}", f"{cache.hit_blocks:,}, {result['hit_ratio']:.2%}")
        if arguments.dram:
            moved = f"{result['swapped_out_blocks']:,} down, {result['swapped_in_blocks']:,} up"
            table.add_row("in the second tier", f"{result['dram_hit_blocks']:,} of {arguments.dram:,} blocks; {moved}")
        Console().print(table)
    sys.stdout.write(json.dumps(result) + "\n")
    return 0
