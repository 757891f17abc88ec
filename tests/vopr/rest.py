"""The end of a run: everything heals, comes to rest, and then nothing is left open and nothing is lost."""

from __future__ import annotations

import asyncio
from typing import Any

from pinyon.api.kvstore.v1 import admin_pb2
from pinyon.store.metadata import PREFIX
from pinyon.store.records import entry_of
from tests.vopr.clients import ClientProcess
from tests.vopr.last_drain import TOLD_S, drain_last
from tests.vopr.nodes import NodeProcess
from tests.vopr.operations import ADMIN
from tests.vopr.swarm import content_of

SETTLE_S, REST_S = 9.0, 7.0
"""The longest put or lease, and the pause after the last failure of Redis, or until nodes count each other again."""
FORGET_S = 42.0


async def end(world: Any) -> None:
    """Ends all faults, waits until it is at rest, and checks that nothing is left open and nothing is lost."""
    if world.checker.failure:
        return
    heal(world)
    stays_dead = world.names[-1] if world.plan.stays_dead else ""
    for life in [each for each in world.lives if each.name == stays_dead and not each.dead]:
        life.crash()  # a frozen one that was replaced, too
    await asyncio.sleep(SETTLE_S)
    for name in world.names:
        if name != stays_dead and world.nodes[name].dead:
            world.start(name)
    await asyncio.sleep(FORGET_S if stays_dead else REST_S)
    world.inspect()
    for task, client in world.pending.items():
        if not client.dead:
            world.checker.fail(f"{task.get_name()} of {client.name} has not ended")
    for name, life in world.nodes.items():
        if name == stays_dead:
            _check_forgotten(world, name)
        elif life.dead or not life.ready:
            world.checker.fail(f"{name} does not run at the end")
        elif not world.checker.failure:
            life.rest()
            life.rest_of_quotas([each for each in world.nodes.values() if not each.dead])
            check_listed(world, life)
    for client in world.clients.values():
        if len(client.reader.duties):
            world.checker.fail(f"{client.name} has duties left")
    if not world.checker.failure:
        world.join("reader")
        reader = world.clients["reader"]
        await reader.spawn(_read_all(world, reader), "reading all")
        if world.plan.last_drain and not world.checker.failure:
            await reader.spawn(drain_last(world, reader), "the last drain")
            world.inspect()
    for life in world.lives:
        life.over()  # type: ignore[attr-defined]
    flips = world.wire.struck["flip on the wire"] + len(world.checker.poisoned)
    flips += sum(each.flips for each in world.disks.values())
    if world.covered["corrupt noticed by readers"] and not flips:
        world.checker.fail("readers got other bytes, and no fault has changed any")


def heal(world: Any) -> None:
    world.healed = True
    network, wire = world.network, world.wire
    network.cut.clear()
    network.loss = network.doubling = network.slowness = 0.0
    wire.slow = wire.breaks = wire.flips = wire.late = world.redis.resets = 0.0
    if not world.redis.up:
        world.redis.start(old=False)
    for disk in world.disks.values():
        disk.read_errors = disk.write_errors = disk.short_writes = disk.hangs_until_s = disk.busy_share = 0.0
    for life in world.lives:
        life.thaw()
    world.note("everything is healed")


def check_listed(world: Any, life: NodeProcess) -> None:
    """Checks that Redis has the record of this life, and lists exactly what its table holds."""
    data, table = world.redis.data, life.node.table
    record, boot, blocks = (f"{PREFIX}{{{life.name}}}:{name}" for name in ("record", "life", "blocks"))
    if data.execute("GET", record) is None or data.execute("HGET", boot, "boot").decode() != life.node.boot_id:
        world.checker.fail(f"{life.name} runs, and Redis does not know it")
        return
    listed = data.execute("HGETALL", blocks)
    there = {key: entry_of(*table.entry(key)) for key in table.keys()}  # noqa: SIM118
    wrong = [key.hex() for key in there.keys() | listed.keys() if there.get(key) != listed.get(key)]
    if wrong:
        kinds = len(there.keys() - listed.keys()), len(listed.keys() - there.keys())
        world.checker.fail(
            f"Redis lists {life.name} wrongly: {kinds[0]} lacking, {kinds[1]} too many, {len(wrong)} wrong"
        )


def _check_forgotten(world: Any, name: str) -> None:
    for what in ("record", "life", "blocks"):
        if world.redis.data.execute("EXISTS", f"{PREFIX}{{{name}}}:{what}"):
            world.checker.fail(f"{name} has been gone for {FORGET_S:g} s, and its {what} is still in Redis")


def _evicted(life: NodeProcess) -> tuple[int, int]:
    """Returns how many objects were evicted from memory so far, and how often a region of the disk was begun."""
    return life.node.table.eviction.evicted, 0 if life.node.tier is None else life.node.tier.log._generation


async def _read_held(world: Any, client: ClientProcess, life: NodeProcess, keys: list[bytes], size: int) -> None:
    """Reads objects that a node holds. Fails if one cannot be read, unless it was evicted from memory or disk."""
    begun = _evicted(life)
    await asyncio.sleep(TOLD_S)  # the lease of the read before is over, which a small quota needs
    while keys:
        slots = client.take(len(keys))
        places = [client.pieces(slot, size) for slot in slots]
        read = (await client.reader.read(life.address, keys, places, size, 5.0)).leading
        for key, slot in zip(keys, slots[:read], strict=False):
            if client.slot(slot, size) != content_of(key, size):
                world.checker.fail("the last read got other bytes than were put")
        client.give_back(slots)
        gone = _evicted(life) != begun and read < len(keys) and keys[read] not in life.node.table
        if read < len(keys) and not gone:
            world.checker.fail(f"{life.name} holds {len(keys)} objects of which {read} can be read")
            return
        keys = keys[read + 1 :]


async def _read_all(world: Any, client: ClientProcess) -> None:
    """Reads what the nodes hold: all of it can be read."""
    for life in world.nodes.values():
        if life.dead:
            continue
        table, at_once = life.node.table, world.plan.pool_objects // 3
        if life.disk is not None:  # what is read from the disk needs room in memory
            if table.pinned:
                unpin = admin_pb2.UnpinRequest(keys=b"".join(table.pinned))
                await client.channels.call(life.address, ADMIN, "Unpin", unpin, 5.0)
            at_once = 1 if world.plan.quotas else at_once
        for model in world.plan.models:
            held = [key for key in table.keys() if table.entry(key)[0] == model.size]  # noqa: SIM118
            sound = [key for key in held if (life.name, key) not in world.checker.poisoned]
            if life.disk is not None and life.disk.flips:
                sound = [key for key in sound if table.in_memory(key)]
            keys = world.random.sample(sound, min(len(sound), at_once))
            await _read_held(world, client, life, keys, model.size)
    await asyncio.sleep(0.5)
