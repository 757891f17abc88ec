"""The operations of clients. To add one, write a coroutine and name it in ``OPERATIONS`` with its usual weight."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

from pinyon.api.kvstore.v1 import admin_pb2, admin_pb2_grpc, kvstore_pb2, kvstore_pb2_grpc
from pinyon.core.errors import PinyonError
from pinyon.core.request import RequestClass
from pinyon.messages.request_class import class_to_proto
from pinyon.store.kv_memory import Pieces
from pinyon.store.reader import WHOLE, PartRange, ReadTerms
from pinyon.store.writer import PutOutcome
from tests.vopr.clients import ClientProcess
from tests.vopr.swarm import ModelKind, content_of

STORE, READ = kvstore_pb2_grpc.KvStoreServiceStub, kvstore_pb2_grpc.BlockReadServiceStub
ADMIN = admin_pb2_grpc.StoreAdminServiceStub
TENANTS = ("a", "", "b", "c")
CLEAN_PUT_S, UNCLEAR_PUT_S = 2.0, 40.0
"""The seconds after which a put that ended well, or otherwise, changes nothing any more: it may be on its way, or at a
node that is frozen."""

Operation = Callable[[ClientProcess, Random, float], Awaitable[str]]
"""Returns a word for the outcome; takes the seconds that it may take."""


def prompt(client: ClientProcess, random: Random) -> tuple[ModelKind, list[bytes], RequestClass]:
    """Returns the keys of the beginning of a prompt, and its class.

    Prompts come in pairs of a tenant; their first half is the same."""
    plan = client.world.plan
    model = random.choice(plan.models)
    number = min(int(random.expovariate(3.0 / plan.prompts)), plan.prompts - 1)
    blocks = random.randint(1, plan.prompt_blocks)
    half = plan.prompt_blocks // 2
    keys = []
    for at in range(blocks):
        line = number // 2 * 2 if at < half else number
        keys += model.keys(1000 * line + at, 1)
    return model, keys, RequestClass(tenant=TENANTS[number // 2 % len(TENANTS)])


async def put(client: ClientProcess, random: Random, timeout_s: float) -> str:
    model, keys, owner = prompt(client, random)
    slots = client.take(len(keys))
    if not slots:
        return "no room"
    checker, unclear = client.world.checker, True
    checker.put_begins(keys)
    try:
        for slot, key in zip(slots, keys, strict=True):
            client.fill(slot, content_of(key, model.size))
        pieces = random.choice([1, 1, 2])
        objects = [(key, client.pieces(slot, model.size, pieces)) for slot, key in zip(slots, keys, strict=True)]
        replicas = random.choice([1, 1, 1, 2, 3])
        outcomes = await client.store.put(
            objects, model.size, timeout_s, request_class=owner, parts=model.parts, replicas=replicas
        )
        unclear = replicas > 1 or PutOutcome.FAILED in outcomes or PutOutcome.BEING_PUT in outcomes
        unclear |= any(each.frozen for each in client.world.lives)  # a node tried before may commit when it goes on
        return max(each.value for each in outcomes)
    finally:
        checker.put_ended(keys, UNCLEAR_PUT_S if unclear else CLEAN_PUT_S)
        client.give_back(slots)


async def get(client: ClientProcess, random: Random, timeout_s: float) -> str:
    """Reads a prompt's blocks, whole or some of their parts."""
    model, keys, owner = prompt(client, random)
    parts = WHOLE
    if model.parts > 1 and random.random() < 0.3:
        first = random.randrange(model.parts)
        parts = PartRange(first, random.randint(1, model.parts - first), model.parts)
    slots = client.take(len(keys))
    if not slots:
        return "no room"
    start, length = model.size * parts.first // parts.of, model.size * parts.number // parts.of
    objects = [(key, client.pieces(slot, length)) for key, slot in zip(keys, slots, strict=True)]
    terms = ReadTerms(request_class=owner)
    try:
        if random.random() < 0.5:
            leading = random.random() < 0.5
            arrived = await client.store.get(objects, model.size, timeout_s, parts=parts, leading=leading, terms=terms)
        else:
            arrived = await _get_by_runs(client, objects, model.size, timeout_s, parts, terms)
        for key, slot, there in zip(keys, slots, arrived, strict=True):
            if there and client.slot(slot, length) != content_of(key, model.size)[start : start + length]:
                client.world.checker.fail(f"{client.name} read other bytes of {key.hex()} than were put")
        client.world.covered["blocks read"] += sum(arrived)
        return "hit" if all(arrived) else "part" if any(arrived) else "miss"
    finally:
        client.give_back(slots)


async def _get_by_runs(
    client: ClientProcess,
    objects: list[tuple[bytes, Pieces]],
    size: int,
    timeout_s: float,
    parts: PartRange,
    terms: ReadTerms,
) -> list[bool]:
    """Reads run by run, as a worker does."""
    clock, at, arrived = client.clock, 0, [False] * len(objects)
    end_s = clock() + timeout_s
    while at < len(objects) and (left_s := end_s - clock()) > 0:
        runs = await client.store.leading([key for key, _ in objects[at:]], size, left_s)
        for node, count in runs:
            keys, places = zip(*objects[at : at + count], strict=True)
            with contextlib.suppress(PinyonError):  # a node that fails is a miss
                left_s, length = max(0.001, end_s - clock()), size * parts.number // parts.of
                result = await client.reader.read(node.address, keys, places, length, left_s, parts=parts, terms=terms)
                arrived[at : at + result.leading] = [True] * result.leading
            at += count
        at += not runs
    return arrived


async def exists(client: ClientProcess, random: Random, timeout_s: float) -> str:
    _, keys, _ = prompt(client, random)
    address = f"{random.choice(client.world.names)}:7000"
    request = kvstore_pb2.ExistsRequest(keys=b"".join(keys))
    reply = await client.channels.call(address, STORE, "Exists", request, timeout_s)
    if len(reply.exists) != len(keys):
        client.world.checker.fail("Exists answered for other keys")
    return "some" if any(reply.exists) else "none"


async def look_up(client: ClientProcess, random: Random, timeout_s: float) -> str:
    model, keys, _ = prompt(client, random)
    runs = await client.store.leading(keys, model.size, timeout_s)
    if sum(count for _, count in runs) > len(keys) or any(node.node_id not in client.world.names for node, _ in runs):
        client.world.checker.fail("a look-up found what was not asked for")
    return "some" if runs else "none"


async def remove(client: ClientProcess, random: Random, timeout_s: float) -> str:
    """Removes some keys at one node."""
    world = client.world
    _, keys, _ = prompt(client, random)
    name = random.choice(world.names)
    process, asked_s = world.nodes[name], world.loop.time()
    request = kvstore_pb2.RemoveRequest(keys=b"".join(keys))
    reply = await client.channels.call(f"{name}:7000", STORE, "Remove", request, timeout_s)
    if world.nodes[name] is process:
        world.checker.removed(process, keys, asked_s)
    return "some" if reply.removed else "none"


async def abandon(client: ClientProcess, random: Random, timeout_s: float) -> str:
    """Leases blocks, or begins a put, and forgets it: its time ends it."""
    model, keys, owner = prompt(client, random)
    address = f"{random.choice(client.world.names)}:7000"
    if random.random() < 0.5:
        lease_ms = random.choice([0, 300, 2000])
        request: Any = kvstore_pb2.AcquireRequest(keys=b"".join(keys), lease_ms=lease_ms, allow_gaps=True)
        reply = await client.channels.call(address, READ, "Acquire", request, timeout_s)
        return "leased" if reply.lease_id else "miss"
    request = kvstore_pb2.PutStartRequest(
        keys=b"".join(keys),
        object_bytes=model.size,
        timeout_ms=random.choice([200, 1500]),
        request_class=class_to_proto(owner),
    )
    reply = await client.channels.call(address, STORE, "PutStart", request, timeout_s)
    return "begun" if reply.put_id else "refused"


async def copy(client: ClientProcess, random: Random, timeout_s: float) -> str:
    """Changes the number of copies, or has one node copy what it has to another one."""
    names, checker = client.world.names, client.world.checker
    _, keys, _ = prompt(client, random)
    checker.put_begins(keys)
    try:
        if len(names) == 1 or random.random() < 0.5:
            changed = await client.store.change_replica(keys, random.randint(1, 3), timeout_s)
            return "made" if changed.made else "removed" if changed.removed else "as it was"
        source, target = random.sample(names, 2)
        request = kvstore_pb2.ReplicateRequest(keys=b"".join(keys), target=target, timeout_ms=round(timeout_s * 1000))
        reply = await client.channels.call(f"{source}:7000", STORE, "Replicate", request, timeout_s)
        if reply.copied > len(keys):
            checker.fail("more was copied than was asked for")
        return "made" if reply.copied else "none"
    finally:
        checker.put_ended(keys, UNCLEAR_PUT_S)


async def pin(client: ClientProcess, random: Random, timeout_s: float) -> str:
    _, keys, _ = prompt(client, random)
    packed, address = b"".join(keys), f"{random.choice(client.world.names)}:7000"
    if random.random() < 0.4:
        reply = await client.channels.call(address, ADMIN, "Unpin", admin_pb2.UnpinRequest(keys=packed), timeout_s)
        return "unpinned" if reply.unpinned else "none"
    request = admin_pb2.PinRequest(keys=packed, duration_ms=random.choice([0, 500, 3000]))
    reply = await client.channels.call(address, ADMIN, "Pin", request, timeout_s)
    return "pinned" if reply.pinned else "none"


async def evict(client: ClientProcess, random: Random, timeout_s: float) -> str:
    """Evicts some objects of a node, those of a tenant, or rarely all that are not pinned."""
    request = admin_pb2.EvictRequest(keys=b"".join(prompt(client, random)[1]))
    if random.random() < 0.3:
        request = admin_pb2.EvictRequest(every=True, tenant=random.choice([*TENANTS, None]))
    address = f"{random.choice(client.world.names)}:7000"
    reply = await client.channels.call(address, ADMIN, "Evict", request, timeout_s)
    return "some" if reply.evicted else "none"


async def drain(client: ClientProcess, random: Random, timeout_s: float) -> str:
    """Drains a node, which is then stopped and started again."""
    world = client.world
    plan = world.plan
    lines = [1000 * line for line in range(plan.prompts)]
    keys = [key for each in plan.models for line in lines for key in each.keys(line, plan.prompt_blocks)]
    name = random.choice(world.names)
    life = world.nodes[name]
    world.checker.put_begins(keys)
    try:
        reply = await client.channels.call(f"{name}:7000", STORE, "Drain", kvstore_pb2.DrainRequest(), timeout_s)
    finally:
        world.checker.put_ended(keys, UNCLEAR_PUT_S)
    if reply.seen != reply.objects or reply.copied + reply.lost > reply.objects:
        world.checker.fail(f"a drain counts wrongly: {reply}")
    world.later(random.uniform(0.0, 3.0), life.stop)
    world.later(random.uniform(4.0, 8.0), world.start, name)
    return "copied" if reply.copied else "none"


OPERATIONS: dict[str, tuple[Operation, float]] = {
    "put": (put, 5.0),
    "get": (get, 5.0),
    "exists": (exists, 1.5),
    "look up": (look_up, 1.5),
    "remove": (remove, 1.2),
    "abandon": (abandon, 0.5),
    "copy": (copy, 1.0),
    "pin": (pin, 0.5),
    "evict": (evict, 0.2),
    "drain": (drain, 0.05),
}
