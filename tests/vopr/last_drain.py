"""Copies and a drain when nothing else happens: where all nodes have room, all is where it should be afterwards."""

from __future__ import annotations

import asyncio
from typing import Any

from pinyon.api.kvstore.v1 import admin_pb2, kvstore_pb2
from tests.vopr.clients import ClientProcess
from tests.vopr.operations import ADMIN, STORE
from tests.vopr.swarm import content_of

LAST_S = 30.0
TOLD_S = 2.0
"""The seconds after which all nodes have told what they hold, and their room."""


async def drain_last(world: Any, client: ClientProcess) -> None:
    """Makes room, copies what a node has, drains it, stops it, and reads what it had."""
    staying = [each for each in world.nodes.values() if not each.node.leaving]  # nobody heard that the others may stop
    if len(staying) < 2:
        return
    life = staying.pop(world.random.randrange(len(staying)))
    await _make_room(world, client, life, staying)
    table, theirs = life.node.table, [each.node.table._allocator for each in staying]
    world.checker.put_begins(table.keys())  # they are at other nodes soon, even if they were removed there
    count, slot_bytes = len(table.keys()), max(each.rounded(world.plan.longest) for each in theirs)
    room = min(each.largest_hole_bytes for each in theirs)
    hurt = any(each.disk is not None and each.disk.flips for each in [life, *staying])
    roomy = room > 3 * count * slot_bytes and not world.plan.quotas and not hurt
    if roomy and count and world.random.random() < 0.5:
        await _copy(world, client, [life, *staying], table.keys())
    sizes = {key: table.entry(key)[0] for key in table.keys()}  # noqa: SIM118
    reply = await client.channels.call(life.address, STORE, "Drain", kvstore_pb2.DrainRequest(), LAST_S)
    missing = [key for key in sizes if not any(key in each.node.table for each in staying)]
    if reply.seen != reply.objects or reply.objects != len(sizes):
        world.checker.fail(f"{life.name} had {len(sizes)} objects, and its drain saw {reply.seen} of {reply.objects}")
    if roomy and (missing or reply.lost):
        world.checker.fail(f"{len(missing)} of {len(sizes)} objects of {life.name} are nowhere, {reply.lost} told lost")
    if roomy and not world.checker.failure:
        world.covered["drained with room"] += len(sizes)
        life.stop()
        await asyncio.sleep(TOLD_S)
        await _read(world, client, life.name, sizes)


async def _make_room(world: Any, client: ClientProcess, life: Any, others: list[Any]) -> None:
    """Leaves some objects at this node, and nothing but pinned ones at most of the others."""
    for other in others if world.random.random() < 0.7 else others[1:]:
        await client.channels.call(other.address, ADMIN, "Evict", admin_pb2.EvictRequest(every=True), LAST_S)
    if surplus := life.node.table.keys()[world.plan.pool_objects // 4 :]:
        request = admin_pb2.EvictRequest(keys=b"".join(surplus))
        await client.channels.call(life.address, ADMIN, "Evict", request, LAST_S)
    await asyncio.sleep(TOLD_S)


async def _copy(world: Any, client: ClientProcess, nodes: list[Any], keys: list[bytes]) -> None:
    """Has two copies made of all, then one left."""
    for copies in (2, 1):
        changed = await client.store.change_replica(keys, copies, LAST_S)
        held = [sum(key in each.node.table for each in nodes) for key in keys]
        if changed.missing or set(held) != {copies}:
            world.checker.fail(f"of {copies} copies each there are {held}, {changed}")
        await asyncio.sleep(TOLD_S)
    world.covered["copies changed at the end"] += len(keys)


async def _read(world: Any, client: ClientProcess, name: str, sizes: dict[bytes, int]) -> None:
    # One object that a fault has changed, and its node is left alone for a while.
    excused = any((name, key) in world.checker.poisoned for key in sizes)
    for size in sorted({*sizes.values()}):
        keys = [key for key in sizes if sizes[key] == size]
        slots = client.take(len(keys))
        objects = [(key, client.pieces(slot, size)) for key, slot in zip(keys, slots, strict=True)]
        for key, slot, there in zip(keys, slots, await client.store.get(objects, size, LAST_S), strict=True):
            if client.slot(slot, size) != content_of(key, size) if there else not excused:
                world.checker.fail(f"{key.hex()} cannot be read after {name} was drained")
        client.give_back(slots)
