"""Clients of the simulation: real store clients and readers, each with a process and memory of its own."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from pinyon.store.client import StoreClient
from pinyon.store.kv_memory import Piece, Pieces
from pinyon.store.metadata import StoreMetadata
from pinyon.store.node_channels import NodeChannels
from tests.vopr.engine import SimEngine
from tests.vopr.loop import Process

SLOTS = 64
EMPTY = 0xA5


class ClientProcess(Process):
    """A client; its memory is cut into slots, one for the largest object each."""

    def __init__(self, world: Any, name: str) -> None:
        super().__init__(world.loop, name, world.random)
        self.world = world
        self.node = None
        self.slot_bytes = world.plan.longest
        self.memory = bytearray([EMPTY]) * (SLOTS * self.slot_bytes)
        self._free = list(range(SLOTS))
        self.operations = 0
        """Operations under way."""
        self.context.run(self._build)

    def _build(self) -> None:
        self.engine = SimEngine(self.world.wire)
        self.region = self.engine.register_local_memory(self.memory)
        self.channels = NodeChannels()
        metadata, rng = StoreMetadata("redis://redis:6379/0", timeout_s=1.0), Random(self.world.random.random())
        self.store = StoreClient(self.engine, metadata, self.channels, rng=rng)  # type: ignore[arg-type]
        self.reader = self.store.reader

    def take(self, count: int) -> list[int]:
        """Returns free slots, which nobody has written to since they were given back; none if there are too few."""
        if len(self._free) < count:
            return []
        slots, self._free = self._free[:count], self._free[count:]
        for slot in slots:
            if self.slot(slot, self.slot_bytes).count(EMPTY) != self.slot_bytes:
                self.world.checker.fail(f"{self.name}: memory was written to after its operation had ended")
        return slots

    def give_back(self, slots: Sequence[int]) -> None:
        for slot in slots:
            at = slot * self.slot_bytes
            self.memory[at : at + self.slot_bytes] = bytes([EMPTY]) * self.slot_bytes
        self._free += slots

    def slot(self, slot: int, length: int) -> bytearray:
        at = slot * self.slot_bytes
        return self.memory[at : at + length]

    def fill(self, slot: int, content: bytes) -> None:
        at = slot * self.slot_bytes
        self.memory[at : at + len(content)] = content

    def pieces(self, slot: int, length: int, pieces: int = 1) -> Pieces:
        """Returns where an object of this length lies, in so many pieces."""
        at, step = slot * self.slot_bytes, length // pieces
        return [Piece(self.region.key, at + number * step, step) for number in range(pieces)]

    def over(self) -> None:
        """Ends the process without a warning."""
        if not self.dead:
            self.world.covered["corrupt noticed by readers"] += self.reader.corrupt
            self.kill()
            self.world.buried(self)
