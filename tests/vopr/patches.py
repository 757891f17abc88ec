"""The world that the real modules see instead of sockets, threads, files, clocks and chance."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from random import Random
from typing import Any

import pinyon.runtime.deadlines as deadlines
import pinyon.runtime.eviction as runtime_eviction
import pinyon.runtime.service as service
import pinyon.store.disk_log as disk_log
import pinyon.store.metadata as metadata
import services.kvstore.app as app
import services.kvstore.disk_file as disk_file
import services.kvstore.disk_tier as disk_tier
import services.kvstore.node as node_module
from pinyon.runtime.channel import Channels
from pinyon.store.client import StoreClient
from pinyon.store.quotas import parse_quotas
from pinyon.store.reader import BlockReader
from pinyon.store.writer import BlockWriter
from services.kvstore.copier import Copier
from services.kvstore.drain import Drain
from services.kvstore.node import StoreNode
from services.kvstore.second_copies import SecondCopies
from tests.vopr.disk import SimDisk, SimFolder, SimThreads, system_calls
from tests.vopr.engine import SimEngine, Wire
from tests.vopr.loop import PROCESS
from tests.vopr.network import Network, SimCalls, SimServer
from tests.vopr.redis_link import RedisHost, SimRedis

HEAD_MAX, REMOVED_MAX = 16 << 10, 64
"""Small heads of groups, so that regions can be small, and the log goes round."""
_REAL_PUBLISHER, _REAL_FILE = app.MetadataPublisher, app.DiskFile
CLOCKED = (
    *(StoreNode, StoreClient, BlockReader, BlockWriter, Copier, Drain, SecondCopies),
    *(disk_tier.DiskTier, _REAL_PUBLISHER),
)


class _Memory:
    """A pool with as many bytes as the settings say MiB."""

    def __init__(self, nbytes: int) -> None:
        self.view = memoryview(bytearray(nbytes >> 20))

    def close(self) -> None:
        """Does nothing: there is no thread."""


def _quotas(text: str) -> dict[str, int | float]:
    """Parses quotas, which are in bytes where the settings say MiB, as pools are."""
    return {name: each >> 20 if isinstance(each, int) else each for name, each in parse_quotas(text).items()}


def _nothing(*_: Any, **__: Any) -> Any:
    """Does nothing, and returns a function that does nothing either."""
    return _nothing


def install(
    random: Random, network: Network, wire: Wire, redis: RedisHost, disks: dict[str, SimDisk], region_bytes: int
) -> None:
    """Puts the simulated world in place of the real one, in this process and for good."""

    def set_all(module: Any, **names: Any) -> None:
        for name, value in names.items():
            assert hasattr(module, name), f"{module.__name__} has no {name} any more"
            setattr(module, name, value)

    def store_node(*arguments: Any, **named: Any) -> StoreNode:
        process: Any = PROCESS.get()
        process.node = made = StoreNode(*arguments, **named)
        start = made.start

        async def started() -> None:
            await start()
            process.look_at_disk()

        made.start = started  # type: ignore[method-assign]
        return made

    def engine(*_: Any) -> SimEngine:
        PROCESS.get().engine = made = SimEngine(wire)  # type: ignore[attr-defined]
        return made

    def publisher(*arguments: Any, **named: Any) -> Any:
        PROCESS.get().publisher = made = _REAL_PUBLISHER(*arguments, **named)  # type: ignore[attr-defined]
        return made

    def second_copies(*arguments: Any) -> SecondCopies:
        PROCESS.get().second_copies = made = SecondCopies(*arguments)  # type: ignore[attr-defined]
        return made

    def copier(*arguments: Any) -> Copier:
        PROCESS.get().copier = made = Copier(*arguments)  # type: ignore[attr-defined]
        return made

    clock: Callable[[], float] = lambda: PROCESS.get().clock()  # noqa: E731
    for each in CLOCKED:
        defaults = each.__init__.__kwdefaults__  # type: ignore[misc]
        assert "clock" in defaults
        defaults["clock"] = clock
    set_all(secrets, token_bytes=random.randbytes, randbits=random.getrandbits)
    set_all(Channels, calls_to=lambda channels, address, name: SimCalls(network, address))
    set_all(deadlines, deadlines_of=lambda loop: PROCESS.get().deadlines)
    set_all(runtime_eviction, ThreadPoolExecutor=SimThreads)
    set_all(service, tune_process=_nothing)
    set_all(
        metadata, connect_redis=lambda url, timeout_s, tls=None: SimRedis(redis), close_redis=lambda it: it.aclose()
    )
    set_all(
        app,
        start_transfer_engine=engine,
        GrpcServer=lambda listen, tls, sessions: PROCESS.get().served(SimServer(network, listen)),  # type: ignore[attr-defined]
        Path=SimFolder,
        StoreNode=store_node,
        MetadataPublisher=publisher,
        Copier=copier,
        SecondCopies=second_copies,
        **dict.fromkeys(
            ["register_metrics", "register_transfer_metrics", "show_policies", "add_admin", "changeable_policy"],
            _nothing,
        ),
    )
    set_all(node_module, BigMemory=_Memory, parse_quotas=_quotas)
    calls, locks = system_calls(disks)
    scale = region_bytes * disk_file.REGIONS_MIN
    set_all(disk_log, HEAD_MAX=HEAD_MAX, REMOVED_MAX=REMOVED_MAX)
    set_all(disk_file, HEAD_MAX=HEAD_MAX, os=calls, fcntl=locks)
    set_all(app, DiskFile=lambda folder, size: _REAL_FILE(folder, scale))
    set_all(disk_tier, ThreadPoolExecutor=SimThreads)
    loop = network.loop

    def job_delay(executor: Any) -> float:
        process = PROCESS.get(None)
        disk = None if process is None else disks.get(process.name)
        if disk is not None and getattr(executor, "name", "") == "disk":
            return disk.job_delay_s()
        return random.uniform(1e-4, 2e-3)

    loop.job_delay = job_delay
    asyncio.set_event_loop(loop)
