"""Mooncake Store over TCP: its master, a process with the memory, and clients with registered buffers and no memory.

The clients use what copies least: ``put_from`` and ``get_into`` for one object, their batches for several."""

from __future__ import annotations

import asyncio
import importlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.store_memory import Item, ObjectMemory, digest
from bench.store_process import run
from bench.store_side import POOL_BYTES, Connector, Servers, Store, end_server, free_port, start_server, wait_for_port

SEGMENT = "segment"
_LOCAL_BYTES = 16 << 20
"""The default size of a client's own buffer, which calls with registered buffers do not use."""
_MANY_LOCAL_BYTES = 1 << 20
_TTL_S = 600


def open_client(master: str, segment_bytes: int, local_bytes: int) -> Any:
    client = importlib.import_module("mooncake.store").MooncakeDistributedStore()
    status = client.setup("127.0.0.1", "P2PHANDSHAKE", segment_bytes, local_bytes, "tcp", "", master)
    if status != 0:
        raise RuntimeError(f"a client's setup ended with status {status}")
    return client


class MooncakeProcesses:
    """The master, and a client that lends the store its memory and does nothing else."""

    def __init__(self, option: str, logs: Path) -> None:
        port, metrics = free_port(), free_port()
        program = Path(sys.executable).with_name("mooncake_master")
        options = {
            "rpc_address": "127.0.0.1", "rpc_port": port, "metrics_host": "127.0.0.1", "metrics_port": metrics,
            "client_ttl": _TTL_S,
        }  # fmt: skip
        flags = [f"--{name}={value}" for name, value in options.items()]
        self._master = start_server([str(program), *flags], logs / "mooncake-master.log")
        self._segment: subprocess.Popen[bytes] | None = None
        try:
            wait_for_port(port, self._master)
            master = f"127.0.0.1:{port}"
            command = [sys.executable, "-m", "bench.store_mooncake", SEGMENT, master]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            self._segment = start_server(command, logs / "mooncake-segment.log", **pipes)
            assert self._segment.stdout is not None
            if not any(line == b"ready\n" for line in self._segment.stdout):
                raise RuntimeError("the process with the memory did not start")
        except BaseException:
            self.close()
            raise
        self.address = {"master": master}
        self.pids = {"master": self._master.pid, "segment": self._segment.pid}

    def close(self) -> None:
        for process in (self._segment, self._master):
            if process is not None:
                end_server(process)


def lend_memory(master: str) -> None:
    """Runs the process with the memory until its stdin ends."""
    client = open_client(master, POOL_BYTES, _LOCAL_BYTES)
    print("ready", flush=True)
    sys.stdin.read()
    client.close()


class MooncakeStore:
    def __init__(self, client: Any, memory: ObjectMemory) -> None:
        self._client = client
        self._source, self._landing = memory.source.address, memory.landing.address
        for address in (self._source, self._landing):
            if client.register_buffer(address, memory.nbytes) != 0:
                raise RuntimeError("the client did not take the memory")

    def name(self, number: int) -> str:
        return digest(number).hex()

    async def put(self, items: Sequence[Item], size: int) -> None:
        source = self._source
        if len(items) == 1:
            ((key, _, offset),) = items
            statuses = [self._client.put_from(key, source + offset, size)]
        else:
            places = [source + item.offset for item in items]
            statuses = self._client.batch_put_from([item.key for item in items], places, [size] * len(items))
        if any(statuses):
            raise RuntimeError(f"puts ended with status {next(filter(None, statuses))}")

    async def get(self, items: Sequence[Item], size: int) -> None:
        landing = self._landing
        if len(items) == 1:
            ((key, _, offset),) = items
            sizes = [self._client.get_into(key, landing + offset, size)]
        else:
            places = [landing + item.offset for item in items]
            sizes = self._client.batch_get_into([item.key for item in items], places, [size] * len(items))
        if any(each != size for each in sizes):
            raise RuntimeError(f"gets ended with {set(sizes)}")

    def land(self, items: Sequence[Item], size: int) -> None:
        pass

    async def exists(self, keys: Sequence[str]) -> Sequence[bool]:
        if len(keys) == 1:
            return [self._client.is_exist(keys[0]) == 1]
        answers: list[bool] = self._client.batch_is_exist(keys)
        return answers

    async def remove(self, keys: Sequence[str]) -> None:
        self._client.batch_remove(keys, True)

    async def settle(self, items: Sequence[Item], size: int) -> None:
        pass

    def facts(self) -> dict[str, Any]:
        return {}

    async def close(self) -> None:
        self._client.close()


class ManyMooncakeStore(MooncakeStore):
    """A client beside many others, with a thread of its own for its calls, which block."""

    def __init__(self, client: Any, memory: ObjectMemory) -> None:
        super().__init__(client, memory)
        self._thread = ThreadPoolExecutor(1)

    async def _apart(self, call: Callable[..., int], *arguments: Any) -> int:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)

    async def put(self, items: Sequence[Item], size: int) -> None:
        ((key, _, offset),) = items
        if (status := await self._apart(self._client.put_from, key, self._source + offset, size)) != 0:
            raise RuntimeError(f"a put ended with status {status}")

    async def get(self, items: Sequence[Item], size: int) -> None:
        ((key, _, offset),) = items
        if (status := await self._apart(self._client.get_into, key, self._landing + offset, size)) != size:
            raise RuntimeError(f"a get ended with status {status}")


class MooncakeConnector:
    def __init__(self, address: dict[str, Any], memory: ObjectMemory, option: str) -> None:
        self._master: str = address["master"]
        self._memory = memory

    async def connect(self, *, many: bool = False) -> Store:
        client = open_client(self._master, 0, _MANY_LOCAL_BYTES if many else _LOCAL_BYTES)
        return (ManyMooncakeStore if many else MooncakeStore)(client, self._memory)

    async def close(self) -> None:
        pass


def start_servers(option: str, logs: Path) -> Servers:
    return MooncakeProcesses(option, logs)


def make_connector(address: dict[str, Any], memory: ObjectMemory, option: str) -> Connector:
    return MooncakeConnector(address, memory, option)


if __name__ == "__main__":
    if sys.argv[1] == SEGMENT:
        lend_memory(sys.argv[2])
    else:
        run(start_servers, make_connector)
