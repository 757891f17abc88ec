"""Requests between a conductor's restart and its rediscovery of all instances."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

from launch.cluster import ClusterSpec, LocalCluster
from launch.ports import HeldPorts
from pinyon.core.address import parse_address
from tests.cluster.fault_tools import known, reads, restart
from tests.cluster.observe import wait_idle
from tests.cluster.specs import PATIENT
from tests.forks import forked
from tests.integration.lb_harness import Connection, Reply
from tests.tcp_server import tcp_server
from tests.waiting import eventually

CLIENTS = 4


class Gate:
    """A TCP proxy in front of the conductor. When closed, it refuses connections and cuts existing ones."""

    def __init__(self, target: str) -> None:
        self._target = parse_address(target)
        self._open = True
        self._relays: set[asyncio.Task[None]] = set()
        self.address = ""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Gate]:
        async with tcp_server(self._accepted) as server:
            host, port = server.sockets[0].getsockname()
            self.address = f"{host}:{port}"
            yield self
            await self.close()

    async def close(self) -> None:
        self._open = False
        for relay in self._relays:
            relay.cancel()
        await asyncio.gather(*self._relays, return_exceptions=True)

    def open(self) -> None:
        self._open = True

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._relays.add(task)
        try:
            if self._open:
                there_reader, there_writer = await asyncio.open_connection(*self._target)
                try:
                    await asyncio.wait(
                        [
                            asyncio.ensure_future(_copy(reader, there_writer)),
                            asyncio.ensure_future(_copy(there_reader, writer)),
                        ],
                        return_when=asyncio.FIRST_COMPLETED,
                    )
                finally:
                    there_writer.transport.abort()
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()
            self._relays.discard(task)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass  # the other end is gone, so this one ends, too


async def complete(cluster: LocalCluster, prompt: str) -> Reply:
    body = json.dumps({"model": "pinyon-tiny", "prompt": prompt, "max_tokens": 4}).encode()
    async with Connection(cluster.http.removeprefix("http://")) as connection:
        connection.send("POST", "/v1/completions", body, {"x-pinyon-report": "1"})
        return await connection.reply()


async def test_requests_in_the_window_of_a_conductor_s_restart(tmp_path):
    """The conductor is killed and restarted without knowing any instance. Clients that keep asking notice nothing."""
    ports = HeldPorts()
    port = ports.take("127.0.0.1")
    async with Gate(f"127.0.0.1:{port}").serving() as gate:
        behind = ("--conductor", gate.address)
        extra = {"worker": behind, "kvstore": behind, "lb": (*PATIENT, "--instances-grace-s", "3600")}
        spec = ClusterSpec(prefill=1, decode=1, engine="instant", conductor_port=port, extra=extra)
        cluster = LocalCluster(spec, tmp_path, forked)
        starter = ThreadPoolExecutor(1)  # processes end with their starting thread, and the loop runs the gate
        try:
            await asyncio.get_running_loop().run_in_executor(starter, cluster.start)
            over, replies = asyncio.Event(), []

            async def client(number: int) -> None:
                while not over.is_set():
                    replies.append(await complete(cluster, f"client {number}, request {len(replies)}"))

            async with asyncio.TaskGroup() as group:
                for number in range(CLIENTS):
                    group.create_task(client(number))

                async def more(count: int) -> list[Reply]:
                    """Returns the replies that arrive from now on to requests sent after this call."""
                    have = len(replies) + CLIENTS
                    await eventually(lambda: len(replies) >= have + count, "clients get answers")
                    return replies[have:]

                await more(8)
                cluster.services["conductor"].kill()
                await gate.close()
                await more(8)
                await restart(cluster, "conductor")
                unconfirmed = ("lb-0", "pinyon_lb_unconfirmed_instances")
                await eventually(lambda: reads(cluster, *unconfirmed, 2), "the load balancer hears of nobody")
                window = await more(20)
                gate.open()
                await known(cluster, spec.instances)
                await eventually(lambda: reads(cluster, *unconfirmed, 0), "the load balancer hears of all")
                after = await more(8)
                over.set()
            assert {reply.status for reply in replies} == {200}, [
                (n, r.body) for n, r in enumerate(replies) if r.status != 200
            ]
            assert {reply.json["pinyon"]["policy"] for reply in window} == {"lb_skywalker"}
            assert {reply.json["pinyon"]["policy"] for reply in after} == {"pinyon"}
            await wait_idle(cluster)
        finally:
            await asyncio.to_thread(cluster.stop)
            starter.shutdown()
            ports.close()
