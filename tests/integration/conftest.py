"""A Redis for the tests of a file, and workers and a file of API keys for a test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from launch.redis_server import find_redis
from tests.integration.kvstore_parts import empty
from tests.integration.worker_parts import Fleet


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    """The workers of this test."""
    fleet = Fleet()
    yield fleet
    await fleet.close()


@pytest.fixture(scope="module")
def redis_server() -> Iterator[str]:
    """The URL of the file's Redis."""
    server = find_redis()
    yield server.url
    server.close()


@pytest.fixture
async def redis_url(redis_server: str) -> str:
    """The URL of the file's Redis, emptied for this test."""
    await empty(redis_server)
    return redis_server


@pytest.fixture
def keys(tmp_path: Path) -> str:
    """The name of a file with one key, ``sk-a`` of the tenant anna."""
    path = tmp_path / "keys"
    path.write_text("sk-a anna\n")
    return str(path)
