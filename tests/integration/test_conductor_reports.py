"""The instances' real report session against a real conductor, through a restart of the conductor."""

from __future__ import annotations

import asyncio
import time

from prometheus_client import CollectorRegistry

from launch.ports import HeldPorts
from pinyon.core.block_keys import pack_keys
from pinyon.core.request import Role
from pinyon.placement.instances import InstanceInfo, InstanceLoad
from pinyon.runtime.report_session import ReportSession
from pinyon.runtime.telemetry import Telemetry
from services.conductor.app import Conductor, build
from services.conductor.settings import ConductorSettings

WAIT_S = 60.0


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


class Cache:
    """A source of reports with a set of keys."""

    def __init__(self) -> None:
        self.keys: set[bytes] = set()
        self.changed: tuple[list[bytes], list[bytes]] = ([], [])

    def change(self, stored: range, removed: range = range(0)) -> None:
        self.keys |= {key(number) for number in stored}
        self.keys -= {key(number) for number in removed}
        self.changed[0].extend(key(number) for number in stored)
        self.changed[1].extend(key(number) for number in removed)

    def snapshot_keys(self) -> list[bytes]:
        return sorted(self.keys)

    def drain_changes(self) -> tuple[list[bytes], list[bytes]]:
        changed, self.changed = self.changed, ([], [])
        return changed

    def load(self) -> InstanceLoad:
        return InstanceLoad(cached_blocks=len(self.keys))

    def news(self) -> None:
        return None

    def decoding(self) -> list[str]:
        return []


def held(conductor: Conductor) -> dict[str, int]:
    """Returns the leading blocks of the prompt 0, 1, 2, ... that each instance holds."""
    match = conductor.fleet.index.match(pack_keys([key(number) for number in range(1000)]))
    found = {state.info.instance_id: match.held_by(state) for state in conductor.fleet.instances()}
    return {name: blocks for name, blocks in found.items() if blocks}


async def eventually(condition) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "in vain"
        await asyncio.sleep(0.005)  # polls, as nothing announces this


async def serve(listen: str) -> tuple[Conductor, str]:
    conductor = build(ConductorSettings(listen=listen), CollectorRegistry(), Telemetry("conductor", "c"))
    return conductor, await conductor.server.start()


async def test_the_index_follows_instances_and_survives_a_restart():
    ports = HeldPorts()  # for the conductor's return to the same address
    conductor, address = await serve(f"127.0.0.1:{ports.take('127.0.0.1')}")
    caches = {name: Cache() for name in ("s0", "s1")}
    caches["s0"].change(range(100))
    sessions = {
        name: ReportSession(address, InstanceInfo(name, "1", Role.STORE, "127.0.0.1:1", capacity_blocks=1000), cache)
        for name, cache in caches.items()
    }
    try:
        for session in sessions.values():
            session.start()
        await eventually(lambda: held(conductor) == {"s0": 100})
        caches["s1"].change(range(10))
        caches["s0"].change(range(100, 200), removed=range(50, 60))
        for session in sessions.values():
            session.wake()
        await eventually(lambda: held(conductor) == {"s0": 50, "s1": 10})

        await conductor.server.drain(0)
        caches["s1"].change(range(10, 20), removed=range(5))
        conductor, address = await serve(address)
        await eventually(lambda: held(conductor) == {"s0": 50} and len(conductor.fleet) == 2)
        await eventually(lambda: len(conductor.fleet.index) == 190)
        caches["s1"].change(range(5))
        sessions["s1"].wake()
        await eventually(lambda: held(conductor) == {"s0": 50, "s1": 20})
        conductor.fleet.index.check_integrity()

        await sessions["s0"].close()
        await eventually(lambda: held(conductor) == {"s1": 20})
        assert len(conductor.fleet) == 1
    finally:
        for session in sessions.values():
            await session.close()
        await conductor.server.drain(0)
        ports.close()
