"""The draw of one seed: how many of everything there are, how small pools are, what is likely to happen."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cache
from random import Random

OPERATIONS_MIN, FAULTS_MIN = 300, 3


@cache
def key_of(model: int, number: int) -> bytes:
    return hashlib.blake2b(b"%d/%d" % (model, number), digest_size=16).digest()


@cache
def content_of(key: bytes, size: int) -> bytes:
    """Returns the one content that an object of this key ever has."""
    return hashlib.shake_128(key).digest(size)


@dataclass(frozen=True)
class ModelKind:
    """Objects of one size, which are put with so many parts."""

    number: int
    size: int
    parts: int

    def keys(self, first: int, count: int) -> list[bytes]:
        return [key_of(self.number, first + at) for at in range(count)]


@dataclass
class Plan:
    """The draw. Shares are probabilities."""

    seed: int
    nodes: int = 1
    clients: int = 1
    disk_share: float = 0.0
    """The share of nodes that have a disk."""
    pool_objects: int = 16
    region_bytes: int = 64 << 10
    prompts: int = 10
    """The number of different prompts; all begin alike in pairs."""
    prompt_blocks: int = 5
    gap_s: float = 0.05
    """The mean time between two operations."""
    operations: int = OPERATIONS_MIN
    faults: int = FAULTS_MIN
    models: tuple[ModelKind, ...] = ()
    operation_weights: dict[str, float] = field(default_factory=dict)
    fault_weights: dict[str, float] = field(default_factory=dict)
    node_lease_s: float = 3.0
    quotas: str = ""
    """The tenants' quotas, where words stand for parts of the whole pool in bytes."""
    pinned_share: float = 0.5
    last_drain: bool = False
    """True if a node is drained at the end, when nothing else happens, to see that nothing is lost."""
    stays_dead: bool = False
    """True if one node is not started again at the end, to see that it is forgotten."""

    @property
    def longest(self) -> int:
        return max(each.size for each in self.models)


def draw(seed: int, operations: dict[str, float], faults: dict[str, float]) -> Plan:
    """Draws a plan; the weights are those of usual days, and some kinds do not happen in some seeds at all."""
    random = Random(seed)
    sizes = random.sample([64, 128, 192, 320, 512], 2)
    models = tuple(ModelKind(number, size, random.choice([1, 1, 2, 4])) for number, size in enumerate(sizes))
    nodes = random.choice([1, 2, 2, 3, 4])
    stays_dead = nodes > 1 and random.random() < 0.05

    def weights(usual: dict[str, float], never: float) -> dict[str, float]:
        drawn = {name: weight * random.choice([0.3, 1.0, 3.0]) for name, weight in usual.items()}
        kept = {name: 0.0 if random.random() < never else weight for name, weight in drawn.items()}
        return kept if any(kept.values()) else drawn

    return Plan(
        seed,
        nodes=nodes,
        clients=random.choice([1, 2, 3]),
        disk_share=random.choice([0.0, 0.5, 1.0, 1.0]),
        pool_objects=random.choice([8, 16, 24, 48]),
        region_bytes=random.choice([32, 64, 128]) << 10,
        prompts=random.choice([4, 10, 24]),
        prompt_blocks=random.choice([2, 4, 6]),
        gap_s=random.choice([0.02, 0.04, 0.08]),
        operations=OPERATIONS_MIN + random.randrange(30),
        faults=FAULTS_MIN + random.choice([0, 1, 3, 6]),
        models=models,
        operation_weights={**weights(operations, 0.1), "put": 5.0, "get": 5.0},
        fault_weights=weights(faults, 0.4),
        node_lease_s=random.choice([1.5, 3.0]),
        stays_dead=stays_dead,
        quotas=random.choice(["", "", "a=30%,*=60%", "a={quarter},b={half}"]),
        pinned_share=random.choice([0.2, 0.5]),
        last_drain=nodes > 1 and not stays_dead and random.random() < 0.3,
    )
