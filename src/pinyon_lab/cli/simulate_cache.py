"""The command ``pinyon simulate-cache``: the share of a trace that a cache of some size holds, by eviction policy."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from pinyon.core.errors import InvalidArgument
from pinyon.eviction import EVICTION_POLICIES, Traits
from pinyon.runtime.eviction_choice import whole_choice
from pinyon_lab.caches.paged_replay import TierReplay
from pinyon_lab.caches.pool_replay import LOOK_AHEAD, POOLS, Build, PoolSize, pool
from pinyon_lab.caches.replay import BELADY, CacheRequest, replayed
from pinyon_lab.cli.trace_input import add_trace, bar, open_trace, print_json, reading

DEFAULT_ROUTER = "cache_affinity"
NODES_SHOWN = 16

_DESCRIPTION = """\
Replay the requests of a trace, in order of time, through a cache of equal blocks, with the very policies that workers
and store nodes have. A hit is a block of a request's longest leading run that is in the cache. Then all of its blocks
are used or stored, and the policy evicts until the rest fits; the request's own blocks are not spared. Service takes no
time. The last line is one JSON object.

With --nodes the cache is a pool of nodes with so many blocks each. Local caches (cache_affinity, round_robin): a hit is
a block on the node that the request runs on. One pool (global, coldest): a hit is a block on any node.

With --dram it is the books of a worker's two tiers, where a request's own blocks are spared."""


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "simulate-cache", help="find the hit ratio of a trace in a cache", description=_DESCRIPTION
    )
    add = parser.add_argument
    add_trace(parser)
    add(
        "--policy",
        default="lru",
        help=f"what is evicted first: {EVICTION_POLICIES.described}, or {BELADY}, which knows the future (default lru)",
    )
    add("--capacity", type=int, required=True, metavar="BLOCKS", help="of the cache, in blocks of the trace's size")
    add("--nodes", type=int, metavar="N", help="a pool of N nodes, each of that capacity")
    add(
        "--router",
        default="",
        help=f"which node of the pool a request runs on: {POOLS.described} (default {DEFAULT_ROUTER})",
    )
    add(
        "--last-copies",
        type=int,
        nargs="?",
        default=0,
        const=LOOK_AHEAD,
        metavar="VICTIMS",
        help=f"with local caches: of so many next victims (default {LOOK_AHEAD}), evict one first that has another "
        "copy in the pool",
    )
    add("--dram", type=int, default=0, metavar="BLOCKS", help="a second tier of so many blocks below the capacity")
    add("--json", action="store_true", help="print nothing but the JSON object")
    parser.set_defaults(run=simulate_cache)


def simulate_cache(arguments: argparse.Namespace) -> int:
    """Replays the trace and prints the results. Raises :class:`PinyonError`."""
    for name, least in (("capacity", 1), ("dram", 0)):
        if (given := getattr(arguments, name)) < least:
            raise InvalidArgument(f"--{name} must be at least {least}, got {given}", field=name)
    choice = whole = arguments.policy
    if choice == BELADY and arguments.dram:
        raise InvalidArgument(f"--dram replays what workers do, and none has {BELADY}", field="policy")
    if choice != BELADY:
        try:
            whole = EVICTION_POLICIES.checked(whole_choice(choice))
        except ValueError as error:
            raise InvalidArgument(f"{error}, {BELADY}", field="policy") from None
    if arguments.nodes is not None and arguments.dram:
        raise InvalidArgument("--dram replays one worker, --nodes a pool: give one of them", field="dram")
    if arguments.nodes is None:
        if arguments.last_copies or arguments.router:
            raise InvalidArgument("--router and --last-copies are for a pool: add --nodes", field="nodes")
        router, nodes = "global", 1
    else:
        router, nodes = arguments.router or DEFAULT_ROUTER, arguments.nodes
    try:
        build: Build = pool(router, PoolSize(nodes, arguments.capacity), arguments.last_copies)
    except ValueError as error:
        raise InvalidArgument(str(error), field="nodes") from None
    if arguments.dram:
        build = lambda _: TierReplay(whole, arguments.capacity, arguments.dram)  # noqa: E731
    trace = open_trace(arguments.trace, arguments.format)
    with reading(trace) as progress:
        rows = trace.sorted_rows(arguments.limit, progress)
    requests = [CacheRequest(row.blocks, row.time_s, Traits(row.category, row.user)) for row in rows]
    with bar("replaying", len(requests)) as progress:
        cache, hits = replayed(requests, whole, build, progress)
    seen = cache.result()
    blocks, hit_blocks = sum(len(asked.blocks) for asked in requests), sum(hits)
    unique = len({block for asked in requests for block in asked.blocks})
    result = {
        "name": "simulate-cache",
        "policy": choice,
        "capacity_blocks": arguments.capacity,
        "block_tokens": trace.format.block_tokens,
        "requests": len(requests),
        "blocks": blocks,
        "hit_blocks": hit_blocks,
        "hit_ratio": hit_blocks / blocks if blocks else 0.0,
        "unique_blocks": unique,
        "evicted_blocks": seen.pop("evicted_blocks"),
        "broken_rows": trace.broken,
    }
    if arguments.nodes is not None:
        result |= {"nodes": nodes, "router": router, "last_copies": arguments.last_copies, **seen}
    elif arguments.dram:
        result |= seen
    if not arguments.json:
        size = nodes * arguments.capacity
        each = f"{nodes} nodes with {arguments.capacity:,} blocks each" if nodes > 1 else f"{size:,} blocks"
        table = Table(box=None, pad_edge=False, show_header=False)
        table.add_row("requests", f"{len(requests):,}")
        table.add_row("blocks asked for", f"{blocks:,} of {trace.format.block_tokens} tokens, {unique:,} unlike")
        table.add_row("capacity", f"{each}, {size / max(1, unique):.1%} of those")
        table.add_row(f"hits with {choice}", f"{hit_blocks:,}, {result['hit_ratio']:.2%}")
        if "duplicate_blocks" in seen:
            table.add_row("if all nodes were read", f"{seen['pool_hit_blocks']:,} hits")
            table.add_row("held more than once", f"{seen['duplicate_blocks']:,} of {seen['resident_blocks']:,} blocks")
        if arguments.dram:
            moved = f"{seen['swapped_out_blocks']:,} down, {seen['swapped_in_blocks']:,} up"
            table.add_row("in the second tier", f"{seen['dram_hit_blocks']:,} of {arguments.dram:,} blocks; {moved}")
        Console().print(table)
        if seen.get("per_node"):
            Console().print(_nodes(seen["per_node"]))
    print_json(result)
    return 0


def _nodes(per_node: Sequence[Mapping[str, int]]) -> Table:
    titles = ("node", *(name.replace("_", " ") for name in per_node[0]))
    table = Table(*(Column(title, justify="right") for title in titles), box=None, pad_edge=False)
    for number, node in enumerate(per_node[:NODES_SHOWN]):
        table.add_row(str(number), *(f"{value:,}" for value in node.values()))
    if len(per_node) > NODES_SHOWN:
        table.add_row("...")
    return table
