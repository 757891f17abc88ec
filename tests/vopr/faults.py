"""Faults. To add one, write a function and name it in ``FAULTS`` with its usual weight.

A fault returns what it did, or nothing if it cannot be done just now. It heals itself after a while."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from tests.vopr.redis_link import NAME as REDIS

Fault = Callable[[Any, Random], str]


def _one(world: Any, random: Random) -> Any:
    """Returns a node that runs, or None."""
    running = [each for each in world.nodes.values() if each.running and each.ready]
    return random.choice(running) if running else None


def crash(world: Any, random: Random) -> str:
    node = _one(world, random)
    if node is None:
        return ""
    node.crash()
    world.later(random.choice([0.05, 0.5, 2.0, 8.0]), world.start, node.name)
    return f"{node.name} crashes"


def stop(world: Any, random: Random) -> str:
    """Stops a node in order, and starts it again."""
    node = _one(world, random)
    if node is None:
        return ""
    node.stop()
    world.later(random.uniform(1.0, 8.0), world.start, node.name)
    return f"{node.name} is stopped"


def freeze(world: Any, random: Random) -> str:
    node = _one(world, random)
    if node is None:
        return ""
    node.freeze()
    seconds = random.choice([0.2, 1.0, 2.5, 6.0, 12.0])
    world.later(seconds, node.thaw)
    return f"{node.name} is frozen for {seconds:g} s"


def replace(world: Any, random: Random) -> str:
    """Freezes a node and starts another process under its name; later the frozen one goes on."""
    node = _one(world, random)
    if node is None:
        return ""
    node.freeze()
    world.later(random.uniform(0.2, 4.0), world.replace, node.name)
    world.later(random.uniform(3.0, 9.0), node.thaw)
    return f"{node.name} is frozen and replaced"


def client_freezes(world: Any, random: Random) -> str:
    client = random.choice(list(world.clients.values()))
    client.freeze()
    seconds = random.choice([0.2, 1.0, 3.0, 6.0])
    world.later(seconds, client.thaw)
    return f"{client.name} is frozen for {seconds:g} s"


def client_dies(world: Any, random: Random) -> str:
    busy = [each for each in world.clients.values() if each.operations]
    if not busy:
        return ""
    client = random.choice(busy)
    client.over()
    world.later(0.1, world.join, client.name)
    return f"{client.name} dies in the midst of {client.operations} operations"


def redis_away(world: Any, random: Random) -> str:
    return _redis(world, random, "what it knew", old=None)


def redis_empty(world: Any, random: Random) -> str:
    return _redis(world, random, "nothing", old=False)


def redis_old(world: Any, random: Random) -> str:
    return _redis(world, random, "old news", old=True)


def _redis(world: Any, random: Random, knows: str, *, old: bool | None) -> str:
    if not world.redis.up:
        return ""
    world.redis.stop()
    seconds = random.choice([0.01, 0.5, 3.0])

    def back() -> None:
        if old is None:
            world.redis.up = True
        else:
            world.redis.start(old=old)

    world.later(seconds, back)
    return f"redis is away for {seconds:g} s and comes back with {knows}"


def partition(world: Any, random: Random) -> str:
    names = [*world.nodes, *world.clients, REDIS]
    group = set(random.sample(names, random.randint(1, max(1, len(names) // 2))))
    cut = {frozenset((one, other)) for one in group for other in names if other not in group}
    if not cut:
        return ""
    world.network.cut |= cut
    seconds = random.choice([0.3, 1.5, 5.0])
    world.later(seconds, world.network.cut.difference_update, cut)
    return f"{sorted(group)} are cut off for {seconds:g} s"


def _weather(holder: str, name: str, shares: list[float]) -> Fault:
    """Returns a fault that raises a share for some seconds."""

    def strike(world: Any, random: Random) -> str:
        what = getattr(world, holder)
        share, seconds = random.choice(shares), random.uniform(0.5, 5.0)
        setattr(what, name, share)
        world.later(seconds, setattr, what, name, 0.0)
        return f"{holder}.{name} is {share:g} for {seconds:.1f} s"

    return strike


def _disk(world: Any, random: Random) -> Any:
    disks = [each for each in world.disks.values() if len(each.image)]
    return random.choice(disks) if disks else None


def _disk_errors(name: str) -> Fault:
    def strike(world: Any, random: Random) -> str:
        disk = _disk(world, random)
        if disk is None:
            return ""
        share, seconds = random.choice([0.1, 0.5, 1.0]), random.uniform(0.5, 5.0)
        setattr(disk, name, share)
        world.later(seconds, setattr, disk, name, 0.0)
        return f"a disk has {name} {share:g} for {seconds:.1f} s"

    return strike


def disk_hangs(world: Any, random: Random) -> str:
    disk = _disk(world, random)
    if disk is None:
        return ""
    seconds = random.choice([0.5, 3.0, 6.0])
    disk.hangs_until_s = world.loop.time() + seconds
    disk.hangs += 1
    return f"a disk hangs for {seconds:g} s"


def disk_flip(world: Any, random: Random) -> str:
    """Flips a bit of an object or of a head on a disk."""
    disk = _disk(world, random)
    if disk is None:
        return ""
    used = [at for at in range(4096, len(disk.image), 4096) if any(disk.image[at : at + 64])]
    if not used:
        return ""
    at = random.choice(used) + random.randrange(64)
    disk.flip(at)
    return f"a bit flips on a disk at {at}"


def memory_flip(world: Any, random: Random) -> str:
    node = _one(world, random)
    held = [] if node is None else list(node.node.table._readable.values())
    if not held:
        return ""
    chosen = random.choice(held)
    at = chosen.offset + random.randrange(chosen.size)
    node.node._region.view[at] ^= 1 << random.randrange(8)
    world.checker.poisoned.add((node.name, chosen.key))
    world.checker.flipped.setdefault(node.engine, set()).add(at)
    return f"a bit flips in the memory of {node.name}"


FAULTS: dict[str, tuple[Fault, float]] = {
    "crash": (crash, 3.0),
    "stop": (stop, 1.0),
    "freeze": (freeze, 2.0),
    "replace": (replace, 1.5),
    "client freezes": (client_freezes, 1.0),
    "client dies": (client_dies, 1.5),
    "redis away": (redis_away, 1.0),
    "redis empty": (redis_empty, 1.0),
    "redis old": (redis_old, 1.5),
    "redis resets": (_weather("redis", "resets", [0.1, 0.4]), 1.0),
    "partition": (partition, 2.0),
    "loss": (_weather("network", "loss", [0.05, 0.3]), 1.0),
    "delay": (_weather("network", "slowness", [0.1, 0.5]), 1.0),
    "doubling": (_weather("network", "doubling", [0.1, 0.5]), 1.0),
    "slow transfers": (_weather("wire", "slow", [0.2, 0.8]), 1.5),
    "broken transfers": (_weather("wire", "breaks", [0.1, 0.5]), 1.0),
    "late writes": (_weather("wire", "late", [0.2, 0.8]), 1.5),
    "flips on the wire": (_weather("wire", "flips", [0.05, 0.3]), 1.0),
    "flip in memory": (memory_flip, 1.0),
    "flip on disk": (disk_flip, 1.0),
    "disk reads fail": (_disk_errors("read_errors"), 0.7),
    "disk writes fail": (_disk_errors("write_errors"), 0.7),
    "short disk writes": (_disk_errors("short_writes"), 0.5),
    "disk hangs": (disk_hangs, 1.0),
}
