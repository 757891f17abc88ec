"""The health probe of containers: healthy, not serving, nobody there, and each kind of address."""

import asyncio
import contextlib
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from launch.redis_server import find_redis
from pinyon.api.kvstore.v1 import kvstore_pb2, kvstore_pb2_grpc
from pinyon.core.errors import Unavailable
from pinyon.runtime.grpc_server import GrpcServer
from pinyon.runtime.healthcheck import main, probe
from pinyon.runtime.tls import server_context
from tests.tcp_server import tcp_server
from tests.tls_files import TestAuthority, tls_of

KV_SERVICE = kvstore_pb2.DESCRIPTOR.services_by_name["KvStoreService"]


@pytest.fixture
def free_address():
    """An address at which nothing listens, as long as the socket is held."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{holder.getsockname()[1]}"


@pytest.mark.parametrize("sessions", [False, True])
async def test_a_grpc_server_is_healthy_until_it_drains(sessions):
    server = GrpcServer("127.0.0.1:0", sessions=sessions)
    server.add(kvstore_pb2_grpc.KvStoreServiceServicer(), KV_SERVICE)
    address = await server.start()
    try:
        assert await asyncio.to_thread(probe, address) == ""
        assert await asyncio.to_thread(main, [address]) == 0
        await server.begin_drain()
        assert await asyncio.to_thread(probe, address) == "not serving"
        assert await asyncio.to_thread(main, [address]) == 1
    finally:
        await server.drain(0)


@pytest.mark.parametrize(("status", "problem"), [(b"200 OK", ""), (b"503 Busy", "HTTP status 503")])
async def test_http_wants_status_200_of_the_path(status, problem):
    asked = []

    async def answer(reader, writer):
        asked.append(await reader.readline())
        writer.write(b"HTTP/1.1 %s\r\ncontent-length: 0\r\nconnection: close\r\n\r\n" % status)
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    async with tcp_server(answer) as server:
        port = server.sockets[0].getsockname()[1]
        assert await asyncio.to_thread(probe, f"http://127.0.0.1:{port}/health/ready") == problem
    assert asked == [b"GET /health/ready HTTP/1.1\r\n"]


def test_redis_answers():
    server = find_redis()
    try:
        assert probe(server.url) == ""
    finally:
        server.close()


@pytest.mark.parametrize("form", ["{}", "http://{}/", "redis://{}"])
def test_nobody_there_is_a_problem_in_bounded_time(form, free_address, capsys):
    assert main([form.format(free_address)]) == 1
    assert free_address in capsys.readouterr().err


def test_silence_is_a_problem():
    """The peer accepts and never answers: the probe has a limit of its own."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
        for form in ("{}:{}", "http://{}:{}/", "redis://{}:{}"):
            assert probe(form.format(host, port), timeout_s=0.2) != ""


PING = b"\0\0\x08\x06\0\0\0\0\0" + bytes(8)


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        (b"\0\0\7\0\1\0\0\0\1" + b"\0\0\0\0\2\x08\1", ""),
        (PING + b"\0\0\7\0\1\0\0\0\1" + b"\0\0\0\0\2\x08\2", "not serving"),
        (b"\0\0\4\3\0\0\0\0\1" + bytes(4), "no answer from its health service"),  # RST_STREAM
        (b"\0\0\1\1\5\0\0\0\1\x88", "no answer from its health service"),  # trailers only
        (b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n", "no answer from its health service"),
        (PING * 10_000, "no answer from its health service"),
    ],
)
def test_what_a_grpc_peer_says_is_read_to_the_end_of_the_call(said, problem):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            with server.accept()[0] as connection, contextlib.suppress(ConnectionError):
                connection.sendall(said)
                while connection.recv(4096):
                    pass

        with ThreadPoolExecutor(1) as pool:
            pool.submit(serve)
            assert probe("{}:{}".format(*server.getsockname())) == problem


@pytest.mark.parametrize("arguments", [[], ["a:1", "b:2"], ["--tls-dir", "x", "a:1"], ["--name", "x"]])
def test_misuse_has_its_own_status(arguments):
    assert main(arguments) == 2


@pytest.mark.parametrize("address", ["http://127.0.0.1:port/", "redis://127.0.0.1:99999", "http://"])
def test_a_bad_address_is_a_problem_not_a_crash(address):
    assert main([address]) == 1


@pytest.fixture
def authority(tmp_path):
    return TestAuthority(tmp_path / "certs")


@pytest.mark.parametrize("sessions", [False, True])
async def test_over_tls_it_shows_its_files_and_compares_the_name(authority, tmp_path, sessions):
    folder = authority.folder("kvstore", "kv-0")
    server = GrpcServer("127.0.0.1:0", tls_of(folder), sessions=sessions)
    address = await server.start()
    try:
        for directory, name, healthy in (
            (folder, "kvstore.pinyon", True),
            (authority.folder("conductor", "c"), "kv-0.kvstore.pinyon", True),
            (folder, "conductor.pinyon", False),
            (TestAuthority(tmp_path / "other").folder("kvstore", "kv-0"), "kvstore.pinyon", False),
            (tmp_path / "nowhere", "kvstore.pinyon", False),
        ):
            arguments = ["--tls-dir", str(directory), "--name", name, address]
            assert await asyncio.to_thread(main, arguments) == (0 if healthy else 1), arguments
        assert await asyncio.to_thread(main, [address]) == 1
    finally:
        await server.drain(0)


@pytest.mark.parametrize(("address", "file"), [("127.0.0.1:1", "tls.key"), ("https://127.0.0.1:1/", "ca.crt")])
def test_a_file_that_is_missing_is_named(address, file, authority, capsys):
    folder = authority.folder("lb", "lb-0")
    (folder / file).unlink()
    assert main(["--tls-dir", str(folder), "--name", "lb.pinyon", address]) == 1
    said = capsys.readouterr().err
    assert f"--tls-dir: cannot read {folder / file}: " in said
    assert "`pinyon certs`" in said


async def test_https_is_verified(authority, tmp_path):
    async def answer(reader, writer):
        await reader.readline()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    folder = authority.folder("lb", "lb-0")
    context = server_context(folder / "tls.crt", folder / "tls.key")
    async with tcp_server(answer, context) as server:
        url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        assert await asyncio.to_thread(probe, url, 20.0, folder) == ""
        other = TestAuthority(tmp_path / "other").folder("lb", "lb-0")
        assert "CERTIFICATE_VERIFY_FAILED" in await asyncio.to_thread(probe, url, 20.0, other)
        assert "CERTIFICATE_VERIFY_FAILED" in await asyncio.to_thread(probe, url, 20.0)


def test_redis_on_a_unix_socket(authority, monkeypatch):
    monkeypatch.setenv("PATH", "")  # the embedded server has no TLS, and listens where TLS is wanted
    try:
        server = find_redis(tls_dir=authority.folder("redis", "redis"))
    except Unavailable as error:
        pytest.skip(error.message)
    try:
        assert server.url.startswith("unix://")
        assert probe(server.url) == ""
    finally:
        server.close()
    assert probe("unix:///nonexistent/socket") != ""
