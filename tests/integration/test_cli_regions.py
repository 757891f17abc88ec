"""``pinyon regions`` and ``pinyon top`` against a running controller."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios

import pytest

from pinyon.api.controller.v1.controller_pb2 import LoadBalancerLoad
from pinyon.cli import main
from pinyon.federation.view import OwnedCluster
from tests.integration.controller_parts import WAIT_S, StubLb, running_controller, spin
from tests.tcp_server import tcp_server


@pytest.fixture
async def address():
    async with running_controller() as (controller, address, _):
        lb = StubLb("eu-0", address, clusters=(OwnedCluster("eu", upstreams=("http://u1", "http://u2")),))
        async with lb:
            lb.session.load_now = LoadBalancerLoad(
                queue=3, instances=2, per_instance=[{"name": "http://u1", "pending": 5, "running": 2, "outstanding": 7}]
            )
            await spin(
                lambda: any(member.load is not None and member.load.queue for member in controller.registry.watched())
            )
            yield address


async def run(capsys, *arguments: str) -> tuple[int, str, str]:
    status = await asyncio.to_thread(main, list(arguments))
    said = capsys.readouterr()
    return status, said.out, said.err


async def test_regions(address, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    status, out, _ = await run(capsys, "regions", "--controller", address)
    assert status == 0
    assert "http://eu-0.example.org" in out
    assert "http://u1 http://u2" in out
    for action, changed in (("remove", "is removed"), ("remove", "was already removed"), ("add", "is added")):
        status, out, _ = await run(capsys, "regions", action, "eu", "http://u1", "--controller", address)
        assert (status, out) == (0, f"http://u1 {changed}\n")
    status, _, err = await run(capsys, "regions", "--controller", address, "forget", "eu-0")
    assert status == 1
    assert "eu-0 is live" in err
    status, _, err = await run(capsys, "regions", "--controller", address, "remove", "mars", "x")
    assert status == 1
    assert "mars" in err


async def test_top_once(address, capsys):
    status, out, _ = await run(capsys, "top", "--once", "--controller", address)
    assert status == 0
    lines = out.splitlines()
    assert lines[0].startswith(f"pinyon top  {address}  version")
    assert lines[-1].split() == ["eu-0", "http://u1", "5", "2", "7", "no"]
    assert "\x1b" not in out


async def test_top_in_a_terminal(address):
    """The table is drawn, drawn again at another window size, and ends with q."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 100, 0, 0))
    before = termios.tcgetattr(slave)
    process = subprocess.Popen(
        [sys.executable, "-m", "pinyon.cli", "top", "--controller", address, "--every-s", "60"],
        stdin=slave,
        stdout=slave,
        env={**{k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}, "TERM": "xterm"},
    )
    drawn = b""

    def until(count: int, what: bytes) -> None:
        nonlocal drawn
        while drawn.count(what) < count:
            assert select.select([master], [], [], WAIT_S)[0], drawn
            drawn += os.read(master, 65_536)

    try:
        await asyncio.to_thread(until, 1, b"http://u1")
        times = drawn.count(b"\x1b[H")
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 40, 0, 0))
        await asyncio.to_thread(until, times + 1, b"\x1b[H")
        os.write(master, b"xq")
        await asyncio.to_thread(until, 1, b"\x1b[?1049l")
        assert await asyncio.to_thread(process.wait, WAIT_S) == 0
        assert termios.tcgetattr(slave) == before
        assert b"\x1b[2J" not in drawn
    finally:
        process.kill()
        process.wait()
        os.close(master)
        os.close(slave)


async def test_top_without_a_controller_says_so(capsys):
    status, _, err = await run(capsys, "top", "--once", "--controller", "127.0.0.1:1", "--timeout-s", "2")
    assert status == 1
    assert "pinyon: no controller answers at 127.0.0.1:1" in err
    status, _, err = await run(capsys, "top", "--once", "--metrics", "127.0.0.1:1")
    assert status == 1
    assert "http://127.0.0.1:1/metrics" in err


async def test_top_of_one_process(capsys):
    from pinyon.runtime.metrics import MetricsServer, new_registry

    server = MetricsServer("127.0.0.1:0", new_registry())
    try:
        status, out, _ = await run(capsys, "top", "--once", "--metrics", server.address)
    finally:
        await asyncio.to_thread(server.close)
    assert status == 0
    assert out.splitlines()[0] == f"pinyon top  http://{server.address}"


@pytest.fixture
def nobody(monkeypatch):
    """A patch by which no service listens at the default addresses."""
    for name in ("CONTROLLER_ADDRESS", "CONDUCTOR_ADDRESS", "LB_ADDRESS"):
        monkeypatch.setattr(f"pinyon.cli.top.{name}", "127.0.0.1:1")


async def test_top_shows_regions_where_a_controller_answers(address, nobody, monkeypatch, capsys):
    monkeypatch.setattr("pinyon.cli.top.CONTROLLER_ADDRESS", address)
    status, out, _ = await run(capsys, "top", "--once", "--every-s", "0.1")
    assert status == 0
    assert out.startswith(f"pinyon top  {address}  version")


async def test_top_with_nobody_there_names_who_was_asked(nobody, capsys):
    status, out, err = await run(capsys, "top")
    assert (status, out) == (1, "")
    assert "no conductor answers at 127.0.0.1:1 (is it running? ./dev up)" in err
    assert "no metrics at http://127.0.0.1:1/metrics: Connection refused" in err


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"\x00\x1b[2J\r\n\r\n", "what answers there speaks no HTTP"),
        (b'HTTP/1.1 404 No\r\ncontent-length: 34\r\n\r\n{"error":{"message":"ask others"}}', "/metrics: ask others"),
        (b"HTTP/1.1 404 No\r\ncontent-length: 0\r\n\r\n", "/metrics: HTTP Error 404: No"),
        (
            b'HTTP/1.1 404 No\r\ncontent-length: 45\r\n\r\n{"error":{"message":"\\u001b[2J ask\\nothers"}}',
            "/metrics: ?[2J ask?others",
        ),
        (b"HTTP/1.1 404 No\r\ncontent-length: 60000\r\n\r\n" + b"[" * 60_000, "/metrics: HTTP Error 404: No"),
    ],
)
async def test_top_says_why_there_are_no_metrics(nobody, capsys, answer, said):
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()
        await writer.wait_closed()

    async with tcp_server(serve) as server:
        host, port = server.sockets[0].getsockname()
        status, _, err = await run(capsys, "top", "--once", "--metrics", f"{host}:{port}")
    assert status == 1
    assert said in err
    assert "\x1b" not in err
