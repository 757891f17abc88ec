"""Several load balancers as processes behind one address: what they serve and count together, and how they end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from launch import supervisor
from launch.balancers.balancer import Balancer
from launch.balancers.group import BalancerGroup
from launch.ports import HeldPort
from launch.process import ServiceProcess
from pinyon.core.address import parse_address
from pinyon.core.errors import Unavailable
from pinyon.runtime.heartbeat import Heartbeat
from tests.forks import forked
from tests.integration.lb_harness import VERSION, WAIT_S, Connection, Front
from tests.integration.upstream_parts import DONE, MODEL, Asked, FakeServer, Wire

ASK = b'{"model":"%b","prompt":"x","max_tokens":1}' % MODEL.encode()


@dataclass
class Processes(Front):
    """The parent of the processes, and the server behind them."""

    parent: ServiceProcess
    server: FakeServer

    @property
    def http(self) -> str:
        return self.parent.endpoints["http"]

    @property
    def pids(self) -> set[int]:
        return {child.pid for child in self.children}

    @property
    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.parent.pid).children()

    async def counted(self) -> dict[tuple[str, ...], float]:
        """Returns their metrics by the sample's name and its labels' values."""
        async with Connection(self.parent.endpoints["metrics"]) as connection:
            connection.send("GET", "/metrics")
            page = (await connection.reply()).body.decode()
        return {
            (sample.name, *sample.labels.values()): sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
        }

    async def until(self, condition: Callable[[dict[tuple[str, ...], float]], bool]) -> dict[tuple[str, ...], float]:
        """Waits until their metrics meet the condition; returns the metrics."""
        async with asyncio.timeout(WAIT_S):
            while not condition(counted := await self.counted()):  # noqa: ASYNC110 - processes have no event for us
                await asyncio.sleep(0.05)
        return counted

    async def ask(self, count: int) -> None:
        """Sends ``count`` requests, each on its own connection."""
        for _ in range(count):
            async with Connection(self.http) as connection:
                connection.send("POST", "/v1/completions", ASK)
                assert (await connection.reply()).status == 200


def both_serve(counted: dict[tuple[str, ...], float]) -> bool:
    lives = [value for key, value in counted.items() if key[0] == "pinyon_lb_upstream_live"]
    return lives == [1.0, 1.0]


@contextlib.asynccontextmanager
async def running(folder: Path, lame_duck_s: int = 0) -> AsyncIterator[Processes]:
    server = FakeServer()
    await server.start()
    arguments = [
        "--processes", "2", "--upstream", server.url, "--http-listen", "127.0.0.1:0", "--lame-duck-s", str(lame_duck_s),
        "--instance-id", "lb", "--drain-s", "30",
    ]  # fmt: skip
    parent = ServiceProcess("lb", "services.lb", arguments, folder / "lb.log", forked)
    parent.spawn()
    try:
        await asyncio.to_thread(parent.wait_ready, time.monotonic() + WAIT_S)
        processes = Processes(parent, server)
        await processes.until(both_serve)
        yield processes
    finally:
        parent.kill()
        await server.stop()


async def test_they_serve_count_and_end_as_one(tmp_path: Path) -> None:
    async with running(tmp_path) as processes:
        parent, server, pids = processes.parent, processes.server, processes.pids
        assert len(pids) == 2
        assert {"http", "metrics", "grpc", "grpc-1"} <= set(parent.endpoints)
        answered = ("pinyon_lb_requests_total", "answered", MODEL)
        await processes.ask(40)
        counted = await processes.counted()
        assert counted[answered] == 40 == len(server.asked)
        assert counted["pinyon_lb_ttft_seconds_count", MODEL] == 40
        async with Connection(processes.http) as connection:
            connection.send("GET", "/metrics")
            refused = await connection.reply()
        assert refused.status == 404
        assert "--metrics-listen" in refused.json["error"]["message"]

        victim, endpoints = next(iter(pids)), dict(parent.endpoints)
        os.kill(victim, signal.SIGKILL)
        counted = await processes.until(
            lambda now: now.get(("pinyon_lb_process_restarts_total",)) == 1 and now.get(("pinyon_lb_processes",)) == 2
        )
        assert counted[answered] == 40  # includes those of the ended process
        assert len(processes.pids - pids) == 1
        assert f"(pid {victim}) was killed by SIGKILL: started again in 0.5 s" in parent.log_path.read_text()
        await processes.until(both_serve)
        for name in ("grpc", "grpc-1"):  # other services know these addresses
            socket.create_connection(parse_address(endpoints[name]), WAIT_S).close()
        await processes.ask(20)
        assert (await processes.counted())[answered] == 60

        go, begun = asyncio.Event(), asyncio.Event()

        async def held(_: Asked, wire: Wire) -> None:
            await wire.begin()
            await wire.chunk(b"data: {}\n\n")
            begun.set()
            await go.wait()
            await wire.chunk(DONE)
            await wire.end()

        server.answer = held
        children = processes.children
        async with Connection(processes.http) as connection:
            connection.send("POST", "/v1/completions", ASK[:-1] + b',"stream":true}')
            await asyncio.wait_for(begun.wait(), WAIT_S)
            parent.signal(signal.SIGTERM)
            await _refuses(processes.http)
            go.set()
            assert (await connection.reply()).body.endswith(DONE)
        assert await asyncio.to_thread(parent.wait, WAIT_S)
        assert parent.process is not None
        assert parent.process.returncode == 0
        assert not any(child.is_running() for child in children)


async def test_they_say_alike_how_they_run(tmp_path: Path) -> None:
    async with running(tmp_path) as processes:
        # the kernel chooses which of them answers
        assert [(await processes.get("/version")).json for _ in range(8)] == [VERSION] * 8
        counted = await processes.counted()
    (build,) = [set(key[1:]) for key in counted if key[0] == "pinyon_build_info"]
    assert build == {VERSION["version"], json.dumps(VERSION["compiled"])}
    (python,) = [key[1:] for key in counted if key[0] == "python_info"]
    assert VERSION["python"] in python
    said = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-m", "services.lb", "--version"], capture_output=True, text=True,
        timeout=2 * WAIT_S, check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert said.stdout == f"pinyon {VERSION['version']} ({'compiled' if VERSION['compiled'] else 'Python'})\n"


async def _refuses(address: str) -> None:
    """Waits until no process listens at the address."""
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                async with Connection(address):
                    await asyncio.sleep(0.02)
            except ConnectionRefusedError:
                return
            except ConnectionResetError:  # the listener stopped before it accepted
                continue


async def test_they_end_with_their_parent(tmp_path: Path) -> None:
    async with running(tmp_path, lame_duck_s=600) as processes:
        running_ = [psutil.Process(pid) for pid in processes.pids]
        processes.parent.kill()
        _, alive = await asyncio.to_thread(psutil.wait_procs, running_, WAIT_S)
        assert alive == []


async def test_the_port_is_free_once_their_parent_is_gone(tmp_path: Path) -> None:
    """The port is kept neither by a long drain time nor by a request under way."""
    async with running(tmp_path, lame_duck_s=600) as processes:
        go, begun = asyncio.Event(), asyncio.Event()

        async def held(_: Asked, wire: Wire) -> None:
            begun.set()
            await go.wait()
            await wire.whole(b"{}")

        processes.server.answer = held
        addresses = [processes.parent.endpoints[name] for name in ("http", "grpc", "grpc-1")]
        async with Connection(processes.http) as connection:
            connection.send("POST", "/v1/completions", ASK)
            await asyncio.wait_for(begun.wait(), WAIT_S)
            processes.parent.kill()
            for address in addresses:
                await _refuses(address)
            HeldPort(addresses[0]).close()
            go.set()
            assert (await connection.reply()).status == 200


def test_a_taken_port_is_told_before_anything_is_started() -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0), reuse_port=True)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-m", "services.lb", "--processes", "2", "--upstream", "http://127.0.0.1:1",
             "--http-listen", f"127.0.0.1:{port}"],
            capture_output=True, text=True, timeout=2 * WAIT_S,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
    assert done.returncode == 1
    assert f"pinyon lb: cannot listen on 127.0.0.1:{port}: Address already in use" in done.stderr


# ---------------------------------------------------------------- processes that misbehave

SERVES = 'import os, sys; fd = int(sys.argv[-1]); os.write(fd, b\'{"pid": 1, "http": "127.0.0.1:1"}\\n\'); os.close(fd)'
DEAF = f"import signal, threading; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SERVES}; threading.Event().wait()"


def child(code: str) -> Balancer:
    """Returns a child that runs this code in place of a load balancer."""

    def launch(
        module: str, arguments: Sequence[str], log: BinaryIO | None, ready_fd: int, more_fds: Sequence[int] = ()
    ) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-c", code, *arguments, "--ready-fd", str(ready_fd)]
        return subprocess.Popen(words, pass_fds=(ready_fd, *more_fds), start_new_session=True)

    return Balancer(0, [], launch)


@contextlib.asynccontextmanager
async def group_of(*codes: str, drain_s: float = 1.0) -> AsyncIterator[BalancerGroup]:
    """Yields a group that is not started; checks that none of its processes is left."""
    group = BalancerGroup([child(code) for code in codes], drain_s)
    try:
        yield group
    finally:
        await group.close()
        assert not any(each.alive for each in group.balancers)


async def test_one_that_dies_at_once_is_given_up_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "QUICK_DEATHS_MAX", 1)
    async with group_of(SERVES + "; sys.exit(3)") as group:
        assert await group.start(asyncio.Event())
        with pytest.raises(
            Unavailable, match=r"process 0 \(pid \d+\) ended with exit code 3: given up after 2 quick deaths in a row"
        ):
            await group.keep(asyncio.Event())


async def test_one_that_hangs_when_it_is_started_again_is_given_up(tmp_path: Path, monkeypatch: Any) -> None:
    """The duration of its starts does not matter, as by the clock here none of them counts as quick."""
    monkeypatch.setattr(supervisor, "QUICK_S", 0.0)
    monkeypatch.setattr(supervisor, "QUICK_DEATHS_MAX", 0)
    hangs = "import os, sys, threading; os.path.exists({0!r}) and threading.Event().wait(); open({0!r}, 'x'); "
    async with group_of(hangs.format(str(tmp_path / "once")) + SERVES) as group:
        assert await group.start(asyncio.Event())
        group.balancers[0].start_s = 0.2
        said = r"was killed by SIGKILL: given up after 1 quick deaths in a row"
        with pytest.raises(Unavailable, match=said):
            await asyncio.wait_for(group.keep(asyncio.Event()), WAIT_S)


async def test_one_that_does_not_come_up_ends_all() -> None:
    async with group_of(DEAF, "raise SystemExit(4)", drain_s=0.0) as group:
        with pytest.raises(Unavailable, match=r"process 0 \(pid \d+\) ended while starting"):
            await group.start(asyncio.Event())


async def test_one_that_is_not_ready_in_time_is_killed() -> None:
    async with group_of("import threading; threading.Event().wait()", drain_s=0.0) as group:
        group.balancers[0].start_s = 0.2
        with pytest.raises(Unavailable, match=r"not ready within 0\.2 s"):
            await group.start(asyncio.Event())


async def test_who_is_to_stop_waits_for_no_start() -> None:
    stopping = asyncio.Event()
    async with group_of("import threading; threading.Event().wait()") as group:
        starting = asyncio.ensure_future(group.start(stopping))
        stopping.set()
        assert not await asyncio.wait_for(starting, WAIT_S)


async def test_one_that_does_not_end_is_killed() -> None:
    async with group_of(DEAF, drain_s=0.1) as group:
        await group.start(asyncio.Event())
        await group.close()
        assert not group.balancers[0].alive


BEATS = (
    "import os, sys, time; beat = int(sys.argv[-3]); " + SERVES + "\nwhile True: os.write(beat, b'.'); time.sleep(0.01)"
)


async def test_one_that_hangs_is_killed_and_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launch.balancers.balancer.ASK_S", 0.3)
    async with group_of(BEATS) as group:
        await group.start(asyncio.Event())
        (hangs,) = group.balancers
        stopping = asyncio.Event()
        keeping = asyncio.ensure_future(group.keep(stopping))
        try:
            pid = hangs.pid
            hangs.signal(signal.SIGSTOP)
            async with asyncio.timeout(WAIT_S):
                while hangs.answers:  # noqa: ASYNC110 - the kernel has no event for us
                    await asyncio.sleep(0.01)
                assert processes_of(group) == 0
                while hangs.pid == pid or not hangs.answers:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert processes_of(group) == 1
        finally:
            stopping.set()
            await keeping


def processes_of(group: BalancerGroup) -> float:
    return next(each.samples[0].value for each in group.collect() if each.name == "pinyon_lb_processes")


async def test_one_that_hangs_is_not_asked_for_its_metrics() -> None:
    """A process listens at the address of its metrics, but never answers."""
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as metrics:
        says = DEAF.replace("http", "metrics").replace("127.0.0.1:1", f"127.0.0.1:{metrics.getsockname()[1]}")
        async with group_of(says, drain_s=0.0) as group:
            await group.start(asyncio.Event())
            (silent,) = group.balancers
            silent.ask()
            with pytest.raises(Unavailable, match="it hangs"):
                silent.metrics()
            metrics.setblocking(False)
            with pytest.raises(BlockingIOError):
                metrics.accept()


async def test_heartbeats_say_until_nobody_listens() -> None:
    beats: list[Heartbeat] = []

    def launch(
        module: str, arguments: Sequence[str], log: BinaryIO | None, ready_fd: int, more_fds: Sequence[int] = ()
    ) -> subprocess.Popen[bytes]:
        beats.append(Heartbeat(os.dup(more_fds[0])))
        return subprocess.Popen([sys.executable, "-c", ""])

    balancer = Balancer(0, [], launch)
    balancer.spawn()
    (heartbeat,) = beats
    for missed in (1, 2):
        balancer.ask()
        assert balancer.missed == missed
    for _ in range(2):
        heartbeat.look()
        balancer.ask()
        assert balancer.missed == 0
    assert not await heartbeat.alone(0)
    balancer.close()
    heartbeat.start()
    assert await heartbeat.alone(WAIT_S)
    heartbeat.close()
    assert balancer.wait(WAIT_S)
    balancer.close_ready()
    nobody = Heartbeat(-1)
    nobody.start()
    assert not await nobody.alone(0)
    nobody.close()


async def test_one_whose_metrics_do_not_come_is_left_out() -> None:
    """The address of its metrics has no listener."""
    async with group_of(DEAF.replace('\\"http\\"', '\\"metrics\\"'), drain_s=0.0) as group:
        await group.start(asyncio.Event())
        families = {each.name: each for each in await asyncio.to_thread(lambda: list(group.collect()))}
    assert families["pinyon_lb_processes"].samples[0].value == 1
    assert set(families) == {"pinyon_lb_processes", "pinyon_lb_process_restarts"}
