"""``pinyon kv`` and the client of the store with TLS: only admins look and change, and workers put and get."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from launch.redis_server import find_redis
from pinyon.cli import main
from pinyon.runtime.security import load_security
from pinyon.runtime.service import ServiceContext
from pinyon.runtime.telemetry import Telemetry
from pinyon.store.connect import open_store
from pinyon.store.writer import PutOutcome
from services.kvstore.app import serving
from services.kvstore.settings import KvStoreSettings
from tests.integration.kvstore_parts import OBJECT, content, key
from tests.tls_files import TestAuthority
from tests.waiting import WAIT_S, eventually


async def test_admins_pin_and_workers_put(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    authority = TestAuthority(tmp_path / "certs")
    redis = find_redis(tls_dir=authority.folder("redis", "redis"))
    folders = {role: str(authority.folder(role, f"{role}-0")) for role in ("admin", "worker", "kvstore")}
    chosen = KvStoreSettings(
        redis_url=redis.url, instance_id="kvstore-0", pool_mib=1, drain_s=0.0, tls_dir=folders["kvstore"]
    )
    security = load_security(chosen, "kvstore")
    stopping = asyncio.Event()
    telemetry = Telemetry("kvstore", "kvstore-0")
    context = ServiceContext("kvstore", "kvstore-0", telemetry, CollectorRegistry(), stopping, security=security)

    async def run(role: str, *words: str) -> tuple[int, str, str]:
        where = ("--redis-url", redis.url, "--tls-dir", folders[role])
        status = await asyncio.to_thread(main, ["kv", words[0], *where, *words[1:]])
        said = capsys.readouterr()
        return status, said.out, said.err

    try:
        async with serving(chosen, context), open_store(redis.url, WAIT_S, tls_dir=folders["worker"]) as store:
            buffer = bytearray(content(1) * 2)
            memory = store.register(buffer, OBJECT)
            assert await store.put([(key(1), memory.pieces(0))], OBJECT, WAIT_S) == (PutOutcome.STORED,)
            buffer[OBJECT:] = bytes(OBJECT)

            async def listed() -> bool:
                return await store.exists([key(1)], OBJECT, WAIT_S) == [True]

            await eventually(listed, "the object in Redis")
            assert await store.get([(key(1), memory.pieces(1))], OBJECT, WAIT_S) == [True]
            assert buffer[OBJECT:] == content(1)
            assert (await run("admin", "pin", key(1).hex()))[:2] == (0, "pinned 1 of 1 keys (copies: 1)\n")
            for verb in (["stat"], ["ls"], ["pin", key(1).hex()], ["evict", "--all"]):
                status, _, err = await run("worker", *verb)
                assert status == 1
                assert "role worker may not call" in err
        async with open_store(redis.url, WAIT_S, tls_dir=folders["admin"]) as store:
            assert await store.nodes() == []
    finally:
        redis.close()
