"""A Redis for the tests of a file; workers, store nodes and a conductor and API keys for a test."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from launch.process import START_S, ServiceProcess, start_module
from launch.redis_server import RedisServer, find_redis
from tests.forks import forked
from tests.integration.conductor_parts import World
from tests.integration.kvstore_parts import Client, Node, client_of, empty, running_node
from tests.integration.worker_parts import Fleet


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    """The workers of this test."""
    fleet = Fleet()
    yield fleet
    await fleet.close()


@pytest.fixture
async def world() -> AsyncIterator[World]:
    """A conductor with the usual settings."""
    async with World() as world:
        yield world


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    """The file's Redis."""
    server = find_redis()
    yield server
    server.close()


@pytest.fixture
async def redis_url(redis_server: RedisServer) -> str:
    """The URL of the file's Redis, emptied for this test."""
    await empty(redis_server.url)
    return redis_server.url


@pytest.fixture
async def node(redis_url: str) -> AsyncIterator[Node]:
    """A store node in this process."""
    async with running_node(redis_url) as node:
        yield node


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[Client]:
    """A client of the store nodes at the file's Redis."""
    async with client_of(redis_url) as client:
        yield client


@pytest.fixture
def start_node(tmp_path: Path, redis_server: RedisServer) -> Iterator[Callable[..., ServiceProcess]]:
    """A function that starts a store node in its own process."""
    processes: list[ServiceProcess] = []

    def start(*arguments: str, node_id: str = "kv-0", redis_url: str = "", netns: str = "") -> ServiceProcess:
        given = ["--instance-id", node_id, "--redis-url", redis_url or redis_server.url]
        given += ["--pool-mib", "64", "--node-lease-s", "60", *arguments]
        launch = partial(start_module, inside=("ip", "netns", "exec", netns)) if netns else forked
        process = ServiceProcess(node_id, "services.kvstore", given, tmp_path / node_id, launch)
        processes.append(process)
        process.spawn()
        process.wait_ready(time.monotonic() + START_S)
        return process

    yield start
    for process in processes:
        process.kill()


@pytest.fixture
def keys(tmp_path: Path) -> str:
    """The name of a file with one key, ``sk-a`` of the tenant anna."""
    path = tmp_path / "keys"
    path.write_text("sk-a anna\n")
    return str(path)
