"""The ``pinyon kv`` command: what the nodes of the KV store hold, and changes to it.

A verb is a function that takes the nodes and the arguments and returns a :class:`VerbAnswer`, and a row of ``_VERBS``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from math import ceil, inf
from types import MappingProxyType
from typing import Any, NamedTuple

from rich.console import Console

from pinyon.api.kvstore.v1 import admin_pb2, kvstore_pb2
from pinyon.cli.channel import add_timeout, add_tls_dir
from pinyon.cli.failures import printable
from pinyon.cli.kv_nodes import StoreNodes, store_nodes
from pinyon.cli.tables import table
from pinyon.core.block_keys import KEY_BYTES, BlockKey, pack_keys, unpack_keys
from pinyon.core.errors import InvalidArgument, PinyonError
from pinyon.store.records import NodeRecord, Tier

KEYS_MAX = 512
ROWS_MAX = 100_000
PAGE = 1024

_DESCRIPTION = """\
Show what the nodes of the KV store hold, and change it. Nodes are found through Redis. A KEY is a block's key, 32 hex
digits. Exit status 1: something was not found, or a node did not answer (the others are shown all the same). With TLS
it takes an admin's certificate; without, changes are for processes of a node's own machine."""

Row = dict[str, Any]
_Options = Mapping[str, Mapping[str, Any]]


class VerbAnswer(NamedTuple):
    """The findings of a verb: programs get ``rows`` by ``name`` and the ``total``, people the tables and the line."""

    name: str
    rows: Sequence[Row]
    tables: Sequence[Sequence[str]] = ()
    """The columns of each table."""
    line: str = ""
    total: Row | None = None
    lacking: Sequence[str] = ()
    """One line for each thing that was asked for and is not there."""


class Verb(NamedTuple):
    name: str
    help: str
    run: Callable[[StoreNodes, argparse.Namespace], Awaitable[VerbAnswer]]
    options: _Options = MappingProxyType({})
    """The keywords of ``add_argument`` by option."""


def add_command(commands: Any) -> None:
    parser = commands.add_parser("kv", help="show and change what the KV store holds", description=_DESCRIPTION)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    redis = os.environ.get("PINYON_REDIS_URL", "")
    for verb in _VERBS:
        each = verbs.add_parser(verb.name, help=verb.help, description=f"{verb.help.capitalize()}.")
        for option, terms in verb.options.items():
            each.add_argument(option, **terms)
        told = "the Redis of the store nodes (default: $PINYON_REDIS_URL)"
        each.add_argument("--redis-url", default=redis, metavar="URL", help=told)
        each.add_argument("--node", default="", metavar="ID", help="only this node (default: all)")
        each.add_argument("--json", action="store_true", help="print one JSON object")
        add_timeout(each)
        add_tls_dir(each)
        each.set_defaults(run=kv, work=verb.run)


def kv(arguments: argparse.Namespace) -> int:
    """Runs a verb and prints its answer."""

    async def work() -> tuple[VerbAnswer, dict[str, str]]:
        where = arguments.redis_url, arguments.node, arguments.tls_dir, arguments.timeout_s
        async with store_nodes(*where) as nodes:
            return await arguments.work(nodes, arguments), nodes.failures

    answer, failures = asyncio.run(work())
    if arguments.json:
        total = {} if answer.total is None else {"sum": answer.total}
        sys.stdout.write(json.dumps({answer.name: answer.rows, **total, "errors": failures}) + "\n")
    else:
        _print(answer)
    # Where a node failed, nobody knows what is not there.
    wrong = [f"{node_id}: {text}" for node_id, text in sorted(failures.items())] or answer.lacking
    sys.stderr.writelines(f"pinyon: {printable(each)}\n" for each in wrong)
    return 1 if wrong else 0


def _print(answer: VerbAnswer) -> None:
    console = Console(highlight=False)
    for columns in answer.tables:
        rows = [tuple(_cell(column, row.get(column)) for column in columns) for row in answer.rows]
        heads = {column: column.removesuffix("_bytes").replace("_", " ") for column in columns}
        console.print(table([*heads.values()], rows, right=[heads[each] for each in _NUMBERS & heads.keys()]))
    if answer.line:
        console.print(answer.line, markup=False)


def _cell(column: str, value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.1f}"
    return _amount(value) if column.endswith("_bytes") else str(value)


def _amount(size_bytes: int) -> str:
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.4g} {unit}"
    return f"{size_bytes} B"


def _row(node: NodeRecord, message: Any) -> Row:
    """Returns the fields of a node's message by name; those that are absent are None."""
    row: Row = {"node": node.node_id}
    for field in message.DESCRIPTOR.fields:
        absent = field.has_presence and not message.HasField(field.name)
        value = None if absent else getattr(message, field.name)
        row[field.name] = value.hex() if isinstance(value, bytes) else value
    return row


# -- what is there


async def _ls(nodes: StoreNodes, arguments: argparse.Namespace) -> VerbAnswer:
    limit, large = arguments.limit, arguments.sort == "large"
    if not 0 < limit <= ROWS_MAX:
        raise InvalidArgument(f"--limit is 1 to {ROWS_MAX}", field="limit")

    async def pages(node: NodeRecord) -> tuple[list[Row], int, int]:
        request = admin_pb2.ListObjectsRequest(largest=large, tenant=arguments.tenant)
        rows: list[Row] = []
        while True:
            request.limit = min(PAGE, limit - len(rows))
            reply = await nodes.ask(node, "ListObjects", request)
            rows += [_row(node, each) for each in reply.objects]
            request.page_token = reply.next_page_token
            if len(rows) >= limit or not reply.next_page_token:
                return rows, reply.total_objects, reply.total_bytes

    def rank(row: Row) -> tuple[float, str]:
        idle_ms = inf if row["idle_ms"] is None else row["idle_ms"]
        return -(row["size_bytes"] if large else idle_ms), row["key"]

    found = await nodes.each(pages)
    rows = sorted([row for _, (some, _, _) in found for row in some], key=rank)[:limit]
    for row in rows:
        idle_ms = row.pop("idle_ms")
        row |= {"idle_s": None if idle_ms is None else idle_ms / 1000, "tier": _TIERS[row.pop("on_disk")]}
    total = {"objects": sum(each[1] for _, each in found), "size_bytes": sum(each[2] for _, each in found)}
    columns = ("key", "size_bytes", "tier", "node", "tenant", "category", "leases", "pinned", "idle_s")
    line = f"{len(rows)} of {total['objects']} objects, {_amount(total['size_bytes'])} in all"
    return VerbAnswer("objects", rows, [columns], line, total)


async def _stat(nodes: StoreNodes, arguments: argparse.Namespace) -> VerbAnswer:
    found = {node.node_id: _row(node, reply) for node, reply in await nodes.ask_each("Stat", admin_pb2.StatRequest())}
    total: Counter[str] = Counter()
    for row in found.values():
        row["free_bytes"] = row["capacity_bytes"] - row["used_bytes"]
        total.update({name: value for name, value in row.items() if type(value) is int})
    asked = ({"node": node.node_id, "address": node.address} for node in nodes.chosen)
    rows = [{**each, "answers": each["node"] in found, **found.get(each["node"], {})} for each in asked]
    tables = [_STAT, _STAT_DISK] if total["disk_capacity_bytes"] else [_STAT]
    shown = [*rows, {"node": "sum", "answers": "", **total}]
    return VerbAnswer("nodes", rows if arguments.json else shown, tables, total=dict(total))


async def _locate(nodes: StoreNodes, arguments: argparse.Namespace) -> VerbAnswer:
    keys = _keys(arguments)
    request = admin_pb2.ListObjectsRequest(keys=pack_keys(keys), limit=PAGE)
    listed = await nodes.listed(keys)
    held = {
        node.node_id: {each.key: (_TIERS[each.on_disk], each.size_bytes) for each in reply.objects}
        for node, reply in await nodes.ask_each("ListObjects", request)
    }
    rows: list[Row] = []
    for key, replicas in zip(keys, listed, strict=True):
        said = {each.node.node_id: (_TIERS[each.tier is Tier.DISK], each.size_bytes) for each in replicas}
        for node_id in sorted(said.keys() | {each for each in held if key in held[each]}):
            redis, own = said.get(node_id), held.get(node_id, {}).get(key)
            says = "the same" if own == redis else f"{own[0]}, {own[1]} bytes" if own else "does not have it"
            tier, size = redis or own or ("", 0)
            row = {"key": key.hex(), "node": node_id, "tier": tier, "size_bytes": size, "in_redis": redis is not None}
            rows.append(row | {"node_says": says if node_id in held else "no answer"})
    columns = ("key", "node", "tier", "size_bytes", "in_redis", "node_says")
    return VerbAnswer("copies", rows, [columns], lacking=_lacking(keys, rows, "no node has {}"))


# -- changes


async def _pin(nodes: StoreNodes, arguments: argparse.Namespace) -> VerbAnswer:
    if not 0 <= arguments.seconds < inf:
        raise InvalidArgument("--for is a number of seconds", field="seconds")
    keys = _keys(arguments)
    request = admin_pb2.PinRequest(keys=pack_keys(keys), duration_ms=ceil(arguments.seconds * 1000))
    return await _change(nodes, "Pin", request, "pinned", "no node has {}")


async def _unpin(nodes: StoreNodes, arguments: argparse.Namespace) -> VerbAnswer:
    request = admin_pb2.UnpinRequest(keys=pack_keys(_keys(arguments)))
    return await _change(nodes, "Unpin", request, "unpinned", "{} was not pinned")


async def _change(nodes: StoreNodes, method: str, request: Any, done: str, lacks: str) -> VerbAnswer:
    replies = await nodes.ask_each(method, request)
    rows = [{"key": key.hex(), "node": n.node_id} for n, reply in replies for key in unpack_keys(getattr(reply, done))]
    keys = unpack_keys(request.keys)
    line = f"{done} {len({row['key'] for row in rows})} of {len(keys)} keys (copies: {len(rows)})"
    return VerbAnswer(done, rows, line=line, lacking=_lacking(keys, rows, lacks))


async def _evict(nodes: StoreNodes, arguments: argparse.Namespace) -> VerbAnswer:
    every = arguments.all or arguments.tenant is not None
    if bool(arguments.keys) + arguments.all + (arguments.tenant is not None) != 1:
        raise InvalidArgument("name keys, or give --all, or --tenant", field="keys")
    request = admin_pb2.EvictRequest(keys=pack_keys(_keys(arguments)), every=every, tenant=arguments.tenant)
    rows = [_row(node, reply) for node, reply in await nodes.ask_each("Evict", request)]
    total = {name: sum(row[name] for row in rows) for name in ("evicted", "evicted_bytes", "still_read", "kept")}
    line = f"evicted {total['evicted']} objects, {_amount(total['evicted_bytes'])}"
    line += f"; still being read: {total['still_read']}" if total["still_read"] else ""
    line += f"; pinned, and kept: {total['kept']}" if total["kept"] else ""
    lacking = [] if every or total["evicted"] else ["no node has any of these keys"]
    return VerbAnswer("nodes", rows, line=line, total=total, lacking=lacking)


async def _replicas(nodes: StoreNodes, arguments: argparse.Namespace) -> VerbAnswer:
    keys = _keys(arguments)
    rows = [
        {"key": key.hex(), "nodes": [each.node.node_id for each in replicas]}
        for key, replicas in zip(keys, await nodes.client.locate(keys, nodes.timeout_s), strict=True)
        if replicas
    ]
    changed = await nodes.client.change_replica(keys, arguments.copies, nodes.timeout_s)
    line = f"{len(rows)} of {len(keys)} keys have copies; made {changed.made} copies, removed {changed.removed}"
    lacking = _lacking(keys, rows, "no node has {}")
    lacking += [f"{changed.missing} copies could not be made"] if changed.missing else []
    return VerbAnswer("before", rows, line=line, total=changed._asdict(), lacking=lacking)


async def _drain(nodes: StoreNodes, arguments: argparse.Namespace) -> VerbAnswer:
    if not arguments.node:
        raise InvalidArgument("--node names the node that is to leave", field="node")
    (node,) = nodes.chosen
    last, shown = kvstore_pb2.DrainResponse(), sys.stderr.isatty()
    try:
        async for last in nodes.drain(node):
            if shown:
                sys.stderr.write(f"\r{last.seen} of {last.objects} objects")
    except PinyonError as error:
        nodes.failures[node.node_id] = error.message
        return VerbAnswer("nodes", [])
    finally:
        if shown:
            sys.stderr.write("\n")
    row = _row(node, last)
    line = f"{node.node_id} may be stopped: copied {last.copied} of {last.objects} objects, "
    lacking = [f"{last.lost} objects fit nowhere else, and will go with the node"] if last.lost else []
    return VerbAnswer("nodes", [row], line=f"{line}{_amount(last.copied_bytes)}; lost: {last.lost}", lacking=lacking)


def _keys(arguments: argparse.Namespace) -> list[BlockKey]:
    """Returns the keys that were given, each once."""
    for word in arguments.keys:
        if len(word) != 2 * KEY_BYTES or not all(digit in "0123456789abcdefABCDEF" for digit in word):
            raise InvalidArgument(f"{word!r} is no key: a key is {2 * KEY_BYTES} hex digits", field="keys")
    keys = list(dict.fromkeys(map(bytes.fromhex, arguments.keys)))
    if len(keys) > KEYS_MAX:
        raise InvalidArgument(f"at most {KEYS_MAX} keys at once", field="keys")
    return keys


def _lacking(keys: Sequence[BlockKey], rows: Sequence[Row], text: str) -> list[str]:
    there = {row["key"] for row in rows}
    return [text.format(key.hex()) for key in keys if key.hex() not in there]


_TIERS = {False: "memory", True: "disk"}
_STAT = (
    *("node", "answers", "capacity_bytes", "used_bytes", "free_bytes", "objects", "pinned_bytes", "leases"),
    *("open_puts", "hits", "misses", "evicted", "refused"),
)
_STAT_DISK = ("node", "disk_capacity_bytes", "disk_used_bytes", "disk_objects", "disk_unsaved", "disk_failures")
_NUMBERS = {"size_bytes", "leases", "idle_s", *_STAT[2:], *_STAT_DISK[1:]}
_KEYS: _Options = {"keys": {"nargs": "+", "metavar": "KEY", "help": f"32 hex digits; at most {KEYS_MAX} keys"}}
_TENANT: _Options = {"--tenant": {"default": None, "metavar": "T", "help": 'only those of this tenant ("": of none)'}}
_LS: _Options = {
    "--sort": {"choices": ("cold", "large"), "default": "cold", "help": "which come first (default cold)"},
    "--limit": {"type": int, "default": 50, "metavar": "N", "help": "most objects to show (default 50)"},
    **_TENANT,
}
_REPLICAS: _Options = {
    **_KEYS,
    "--copies": {"type": int, "default": 2, "metavar": "N", "help": "copies of each block (default 2)"},
}
_FOR = "how long (default: until they are unpinned or the node restarts)"
_PIN: _Options = {
    **_KEYS,
    "--for": {"type": float, "default": 0.0, "dest": "seconds", "metavar": "SECONDS", "help": _FOR},
}
_EVICT: _Options = {
    "keys": {"nargs": "*", "metavar": "KEY", "help": "these, even if they are pinned"},
    "--all": {"action": "store_true", "help": "all that are not pinned"},
    **_TENANT,
}
_VERBS = (
    Verb("ls", "list objects, the coldest or largest first", _ls, _LS),
    Verb("stat", "show room, objects, leases and disk of each node", _stat),
    Verb("locate", "show where these keys are by Redis, and whether the nodes agree", _locate, _KEYS),
    Verb("pin", "keep these objects in memory, so that they are not evicted", _pin, _PIN),
    Verb("unpin", "let pinned objects be evicted again", _unpin, _KEYS),
    Verb("replicas", "give these blocks so many copies at different nodes", _replicas, _REPLICAS),
    Verb("drain", "copy to other nodes what only this one has, so that it may be stopped", _drain),
    Verb("evict", "drop objects from memory and disk", _evict, _EVICT),
)
