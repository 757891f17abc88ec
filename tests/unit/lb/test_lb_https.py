"""HTTPS: memory that a client holds before its TLS handshake counts like memory it holds afterwards."""

from __future__ import annotations

import asyncio
import socket
import ssl

import pytest

from pinyon.core.errors import InvalidArgument
from pinyon.http.peers import PeerPlaces
from pinyon.http.server import HttpServer
from services.lb.balancer import Https
from tests.tls_files import TestAuthority
from tests.unit.lb.test_lb_http_connection import World

WAIT_S = 60.0
PLAIN = b"GET /plain HTTP/1.1\r\nhost: lb\r\n\r\n"


class Served:
    """An HTTPS server in this process, and its clients."""

    def __init__(self, authority: TestAuthority, connections: int = 4096, per_peer: int = 64) -> None:
        folder = authority.folder("lb", "lb-0")
        self.trust = ssl.create_default_context(cafile=str(folder / "ca.crt"))
        self.shared = World(connections=connections).shared
        self.peers = self.shared.peer_connections = PeerPlaces(per_peer)
        self.https = Https(folder / "tls.crt", folder / "tls.key")
        self.server = HttpServer(self.shared, "127.0.0.1:0", lambda: self.https.context)
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> Served:
        self.host, _, port = (await self.server.start()).rpartition(":")
        self.port = int(port)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.drain(0)
        for writer in self._writers:
            writer.transport.abort()

    async def connect(self, tls: ssl.SSLContext | None = None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(self.host, self.port, ssl=tls)
        self._writers.append(writer)
        return reader, writer

    async def status(self) -> bytes:
        """Returns the status of a request on its own connection, or nothing if the server refuses it."""
        try:
            reader, writer = await self.connect(self.trust)
            writer.write(PLAIN)
            return (await reader.readline())[9:12]
        except OSError:
            return b""

    async def until(self, condition) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():  # noqa: ASYNC110 - a server has no event for us
                await asyncio.sleep(0.001)


@pytest.fixture
def authority(tmp_path) -> TestAuthority:
    return TestAuthority(tmp_path / "certs")


async def test_a_renewed_certificate_is_shown_to_new_connections(authority):
    """The renewal makes a context of its own in a thread: handshakes under way keep the whole old one."""
    async with Served(authority) as served:

        async def shown() -> bytes:
            _, writer = await served.connect(served.trust)
            return writer.get_extra_info("ssl_object").getpeercert(binary_form=True)

        before, first = served.https.context, await shown()
        authority.folder("lb", "lb-0")
        await asyncio.to_thread(served.https.renew)
        assert served.https.context is not before
        assert await shown() not in (first, b"")
        served.https.files[1].write_text("no key")
        renewed = served.https.context
        with pytest.raises(InvalidArgument):
            served.https.renew()
        assert served.https.context is renewed
        assert await served.status() == b"200"


async def test_requests_are_answered(authority):
    async with Served(authority) as served:
        reader, writer = await served.connect(served.trust)
        for size in (5, 100_000):
            writer.write(b"POST /a HTTP/1.1\r\nhost: lb\r\ncontent-length: %d\r\n\r\n" % size + b"x" * size)
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), WAIT_S)
            assert head.startswith(b"HTTP/1.1 200 ")
            await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split()[0]))
        assert served.shared.admitted == 1
        writer.close()
        await served.until(lambda: not served.shared.admitted and not len(served.peers))


async def test_a_request_that_comes_with_the_handshakes_end_is_read(authority):
    """The request shares a packet with the handshake's end, as a client in a hurry sends it."""
    async with Served(authority) as served:
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = served.trust.wrap_bio(incoming, outgoing, server_hostname="localhost")
        reader, writer = await served.connect()
        with pytest.raises(ssl.SSLWantReadError):
            client.do_handshake()
        writer.write(outgoing.read())
        while True:
            incoming.write(await asyncio.wait_for(reader.read(65536), WAIT_S))
            try:
                client.do_handshake()
                break
            except ssl.SSLWantReadError:
                continue
        client.write(PLAIN)
        writer.write(outgoing.read())
        answer = b""
        while b"plain" not in answer:
            incoming.write(await asyncio.wait_for(reader.read(65536), WAIT_S))
            try:
                answer += client.read(65536)
            except ssl.SSLWantReadError:
                continue
        assert answer.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("limits", [{"connections": 3}, {"per_peer": 3}])
async def test_who_says_nothing_counts(authority, limits):
    async with Served(authority, **limits) as served:
        silent = [await served.connect() for _ in range(3)]
        await served.until(lambda: served.shared.admitted == 3)
        reader, _ = await served.connect()
        assert await asyncio.wait_for(reader.read(), WAIT_S) == b"", "the fourth is not waited for"
        assert await served.status() == b""
        silent[0][1].close()
        await served.until(lambda: served.shared.admitted == 2)
        assert await served.status() == b"200"


async def test_what_is_no_tls_gives_its_place_back(authority):
    async with Served(authority) as served:
        reader, writer = await served.connect()
        writer.write(PLAIN)
        assert b"HTTP" not in await asyncio.wait_for(reader.read(), WAIT_S)
        await served.until(lambda: not served.shared.admitted and not len(served.peers))


async def test_the_end_does_not_wait_for_who_says_nothing(authority):
    async with Served(authority) as served:
        reader, _ = await served.connect()
        await served.until(lambda: served.shared.admitted == 1)
        await asyncio.wait_for(served.server.drain(WAIT_S), WAIT_S / 2)
        assert await asyncio.wait_for(reader.read(), WAIT_S) == b""
        assert (served.shared.admitted, len(served.peers)) == (0, 0)


async def test_who_connected_in_time_is_answered(authority):
    """The kernel made these connections, and the server ended before it accepted them."""
    async with Served(authority) as served:
        clients = [socket.create_connection((served.host, served.port), WAIT_S) for _ in range(5)]
        draining = asyncio.ensure_future(served.server.drain(WAIT_S))

        async def answer(client: socket.socket) -> bytes:
            client.setblocking(False)
            reader, writer = await asyncio.open_connection(sock=client, ssl=served.trust, server_hostname=served.host)
            writer.write(PLAIN)
            line = await reader.readline()
            writer.close()
            return line[9:12]

        async with asyncio.timeout(WAIT_S):
            assert await asyncio.gather(*map(answer, clients)) == [b"200"] * 5
        await draining
        assert (served.shared.admitted, len(served.peers)) == (0, 0)
