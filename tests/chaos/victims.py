"""The faults of one process: it is killed, frozen or told to end, and comes back."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from launch.cluster import LocalCluster
from launch.process import Child
from tests.chaos.balancer import Balancer
from tests.cluster.fault_tools import redis_process, start_redis

FAULTS = ("kill", "freeze", "drain")
"""SIGKILL and a restart; SIGSTOP and SIGCONT; SIGTERM, and a restart at its end."""
END_S = 60.0


@dataclass(frozen=True)
class Pace:
    """Durations in seconds: traffic before a fault and after the victim's return, and the time it is dead or frozen."""

    calm_s: float = 3.0
    after_s: float = 5.0
    dead_s: float = 1.0
    frozen_s: float = 5.0


Note = Callable[[str], None]


async def strike(cluster: LocalCluster, balancer: Balancer, name: str, fault: str, pace: Pace, note: Note) -> None:
    """Strikes the victim and returns when it is back. ``note`` is called right after the named event has happened."""
    process = _process(cluster, name)
    if fault == "freeze":
        process.send_signal(signal.SIGSTOP)
        try:
            note("frozen")
            await asyncio.sleep(pace.frozen_s)
        finally:
            process.send_signal(signal.SIGCONT)
        note("wakes")
        return
    if fault == "kill":
        balancer.killed(name)
        process.kill()
        note("killed")
        await _end(process)
        await asyncio.sleep(pace.dead_s)
    else:
        process.send_signal(signal.SIGTERM)
        note("told to go")
        await _end(process)
        note("gone")
    if name == "redis":
        start_redis(cluster)
    else:
        # A child ends with the thread that started it, and this thread lives on.
        service = cluster.services[name]
        service.start_again()
        await asyncio.to_thread(service.wait_ready, time.monotonic() + END_S)
    balancer.returned(name)
    note("back")


def mend(cluster: LocalCluster) -> None:
    """Makes all processes run again after an interrupted fault."""
    if cluster.redis is not None and cluster.redis.process is not None:
        with contextlib.suppress(ProcessLookupError):
            cluster.redis.process.send_signal(signal.SIGCONT)
    for service in cluster.services.values():
        service.signal(signal.SIGCONT)


def _process(cluster: LocalCluster, name: str) -> Child:
    process = redis_process(cluster) if name == "redis" else cluster.services[name].process
    assert process is not None
    return process


async def _end(process: Child) -> None:
    await asyncio.to_thread(process.wait, END_S)
