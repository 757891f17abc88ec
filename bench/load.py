"""A load generator that costs little: closed-loop clients on raw sockets, and CPU time of other processes."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Sample:
    """The latencies of one request, in seconds from its sending."""

    first_byte_s: float
    total_s: float


def cpu_seconds(pids: list[int]) -> float:
    """Returns the CPU time of these processes so far, all threads, from the scheduler's own nanosecond accounting."""
    total = 0
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            try:
                total += int((task / "schedstat").read_text().split()[0])
            except (OSError, IndexError):  # the thread ended meanwhile
                continue
    return total / 1e9


def http_request(
    host: str,
    path: str,
    body: dict[str, object],
    headers: Mapping[str, str] = {},  # never changed
) -> bytes:
    raw = json.dumps(body).encode()
    lines = {"Host": host, "Content-Type": "application/json", "Content-Length": str(len(raw)), **headers}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + raw


async def http_answer(address: str, request: bytes) -> dict[str, Any]:
    """Returns the JSON of an answer that is not streamed, over a connection of its own. Raises RuntimeError unless the
    status is 200."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        body = await reader.readexactly(int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0]))
    finally:
        writer.close()
    if not head.startswith(b"HTTP/1.1 200"):
        raise RuntimeError((head + body[:500]).decode(errors="replace"))
    answer: dict[str, Any] = json.loads(body)
    return answer


class HttpClient:
    """One keep-alive connection, by TLS if there is a ``context``."""

    def __init__(self, address: str, context: ssl.SSLContext | None = None) -> None:
        host, _, port = address.rpartition(":")
        self._host, self._port = host, int(port)
        self._context = context
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def send(self, request: bytes) -> Sample:
        """Sends a request and reads the whole answer. Raises RuntimeError unless the status is 200."""
        if self._writer is None or self._reader is None:
            self._reader, self._writer = await asyncio.open_connection(self._host, self._port, ssl=self._context)
        reader = self._reader
        started = time.perf_counter()
        self._writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        lowered = head.lower()
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(head.decode(errors="replace") + (await reader.read(500)).decode(errors="replace"))
        first = 0.0
        if b"content-length:" in lowered:
            length = int(lowered.split(b"content-length:")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
        else:
            while True:
                size = int(await reader.readuntil(b"\r\n"), 16)
                first = first or time.perf_counter() - started
                await reader.readexactly(size + 2)
                if size == 0:
                    break
        total = time.perf_counter() - started
        return Sample(first or total, total)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


async def run_closed_loop(send, count: int, concurrency: int) -> list[Sample]:
    """Calls ``send(client_number)`` ``count`` times, ``concurrency`` at once."""
    samples: list[Sample] = []
    numbers = iter(range(count))

    async def client(number: int) -> None:
        for _ in numbers:
            samples.append(await send(number))  # noqa: PERF401 - one list for all clients

    async with asyncio.TaskGroup() as group:
        for number in range(concurrency):
            group.create_task(client(number))
    return samples
