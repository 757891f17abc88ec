"""The timed part of the store benchmark: one client's puts, gets and questions, as a row says."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from bench.store_memory import Item, ObjectMemory
from bench.store_side import Store, cpu_s

OBJECTS_MOST = 32768
"""The largest number of objects that one row puts in a round."""
VERIFY_BYTES = 64 << 20
"""The bytes of the last gets of a row that are compared, once in each round."""


def items_of(store: Store, first: int, size: int, batch: int, nbytes: int) -> list[list[Item]]:
    """Returns as many calls of ``batch`` fresh objects as fit into the memory, each object at a place of its own."""
    calls = max(1, min(nbytes // size, OBJECTS_MOST) // batch)
    items = [Item(store.name(first + at), first + at, at * size) for at in range(calls * batch)]
    return [items[start : start + batch] for start in range(0, len(items), batch)]


class Measurement:
    """The rows as commands: each ``do_*`` method is one. A row puts fresh objects, and ``remove`` ends it."""

    def __init__(self, store: Store, memory: ObjectMemory, pids: dict[str, int]) -> None:
        self._store = store
        self._memory = memory
        self._pids = list(pids.values())
        self._next = 1
        self._stored: list[list[Item]] = []

    async def do_put(self, size: int, batch: int, seconds: float) -> dict[str, Any]:
        calls = items_of(self._store, self._next, size, batch, self._memory.nbytes)
        self._next += len(calls) * batch
        self._memory.stamp([item for items in calls for item in items], size)
        took = await self._timed([partial(self._store.put, items, size) for items in calls], seconds)
        self._stored = calls[: len(took["spent_us"])]
        await self._store.settle([item for items in self._stored for item in items], size)
        return took

    async def do_get(self, size: int, batch: int, seconds: float) -> dict[str, Any]:
        """Reads what the last put stored, several times if there is time."""
        calls = self._stored * max(1, OBJECTS_MOST // (len(self._stored) * batch * 4))
        took = await self._timed([partial(self._store.get, items, size) for items in calls], seconds)
        made = calls[: len(took["spent_us"])]
        # A client that keeps what it got knows its last call only.
        self._store.land(made[-1], size)
        checked = {item.number: item for items in made[-max(1, VERIFY_BYTES // (size * batch)) :] for item in items}
        if self._store.facts().get("returns_bytes"):
            checked = {item.number: item for item in made[-1]}
        took["wrong"] = self._memory.wrong(list(checked.values()), size)
        return took

    async def do_exists(self, size: int, batch: int, seconds: float) -> dict[str, Any]:
        """Asks for keys of which every other one is stored."""
        stored = items_of(self._store, self._next, size, 64, size * max(64, batch // 2))
        self._next += len(stored) * 64 * 2
        self._memory.stamp([item for items in stored for item in items], size)
        for items in stored:
            await self._store.put(items, size)
        self._stored = stored
        there = [item for items in stored for item in items]
        await self._store.settle(there, size)
        asked = [(key, held) for item in there for key, held in
                 ((item.key, True), (self._store.name(self._next + item.number), False))]  # fmt: skip
        parts = [asked[start : start + batch] for start in range(0, len(asked), batch)]
        parts *= max(1, 8192 // len(parts))
        keys = [[key for key, _ in part] for part in parts]
        answers: list[Sequence[bool]] = []

        async def ask(part: list[Any]) -> None:
            answers.append(await self._store.exists(part))

        took = await self._timed([partial(ask, part) for part in keys], seconds)
        took["wrong"] = sum(
            list(map(bool, said)) != [held for _, held in part] for said, part in zip(answers, parts, strict=False)
        )
        return took

    async def do_remove(self) -> dict[str, Any]:
        keys = [item.key for items in self._stored for item in items]
        for start in range(0, len(keys), 4096):
            await self._store.remove(keys[start : start + 4096])
        self._stored = []
        return {}

    async def do_idle(self, seconds: float) -> dict[str, Any]:
        """Returns the cores that the side uses while nobody asks anything."""
        before = cpu_s([os.getpid(), *self._pids])
        await asyncio.sleep(seconds)
        return {"cores": (cpu_s([os.getpid(), *self._pids]) - before) / seconds, **self._store.facts()}

    async def _timed(self, calls: Sequence[Callable[[], Awaitable[None]]], seconds: float) -> dict[str, Any]:
        spent: list[int] = []
        client, servers = time.process_time(), cpu_s(self._pids)
        last = started = time.perf_counter_ns()
        end = started + int(seconds * 1e9)
        for call in calls:
            await call()
            now = time.perf_counter_ns()
            spent.append(now - last)
            last = now
            if now > end:
                break
        return {
            "spent_us": [round(each / 1e3, 1) for each in spent],
            "seconds": (last - started) / 1e9,
            "client_cpu_s": time.process_time() - client,
            "server_cpu_s": cpu_s(self._pids) - servers,
        }
