"""Requests of clients that are hostile or broken."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
from typing import Any

WAIT_S = 60.0
STATUSES = {100, 200, 400, 401, 404, 405, 408, 413, 414, 429, 431, 501, 505}
"""The statuses that a fuzzed request may get: a client's error, or success."""
LAST = b"GET /health HTTP/1.1\r\nHost: lb\r\nConnection: close\r\n\r\n"
CHUNKED = "POST /v1/completions HTTP/1.1\r\nHost: lb\r\nTransfer-Encoding: chunked\r\n\r\n"
NEVER_ENDING = [
    ("GET / HTTP/1.1\r\nHost: lb\r\nx: ", b"a" * 10_000, 431),
    ("GET / HTTP/1.1\r\nHost: lb\r\n", b"a: b\r\n" * 1000, 431),
    ("GET /", b"a" * 10_000, 414),
    (CHUNKED + "0\r\n", b"x-trailer: aaaaaaaaaaaaaaaaa\r\n" * 400, 431),
    (CHUNKED + "0\r\nx: ", b"a" * 10_000, 431),
    (CHUNKED + "1", b"0" * 10_000, 400),
    (CHUNKED + "1;", b"a" * 10_000, 400),
    (CHUNKED, b"1000\r\n" + b"a" * 4096 + b"\r\n", 413),
    ("POST /v1/completions HTTP/1.1\r\nHost: lb\r\nContent-Length: 99999999\r\n\r\n", b"a" * 10_000, 413),
    ("\x16\x03\x01", b"a" * 10_000, 400),
]
"""Requests that never end: ``(beginning, piece repeated without end, status)``."""


def ask(model: str, prompt: str = "hello", size: int = 0, **fields: Any) -> bytes:
    """Returns a request body, padded to ``size`` bytes with spaces, which JSON ignores."""
    body = json.dumps({"model": model, "prompt": prompt, **fields}).encode()
    return body + b" " * (size - len(body))


async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, piece: bytes, size: int) -> int:
    """Sends ``piece`` until ``size`` bytes are sent or the peer closes; returns how many bytes were sent."""
    sent = 0
    async with asyncio.timeout(WAIT_S):
        with contextlib.suppress(OSError):
            while sent < size and not reader.at_eof():
                writer.write(piece)
                await writer.drain()
                sent += len(piece)
    return sent


def fuzzed(dice: random.Random, model: str) -> bytes:
    """Returns a valid request after random damage; some results are still valid."""
    body = ask(model, "p" * dice.randrange(1, 16), dice.randrange(110), max_tokens=1)
    if dice.random() < 0.2:
        body = json.dumps(
            {"model": model, dice.choice(["prompt", "messages", "stop", "user", "x"]): dice.choice(
                ["", [], {}, [1, 2], [[1]], None, -1, 1e9, True, "\ud800", "a" * 3000])}
        ).encode()  # fmt: skip
    fields = [b"Host: lb", b"X-Request-Id: %d" % dice.randrange(1 << 30)]
    fields += dice.choices(
        [b"Connection: keep-alive", b"Accept: */*", b"Authorization: Bearer x", b"Upgrade: h2c", b"x-pinyon-report: 1",
         b"x-pinyon-priority: 9", b"traceparent: 00-0-0-00", b"Cookie: " + b"c" * 500],
        k=dice.randrange(4),
    )  # fmt: skip
    if dice.random() < 0.1:
        fields.append(
            dice.choice(
                [b"Connection: close", b"Expect: 100-continue", b"x-pinyon-priority: 99999", b"x-pinyon-ttft-slo-ms: 0",
                 b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip", b"Content-Length: 3", b"Host: other"]
            )
        )  # fmt: skip
    if dice.random() < 0.9:
        if dice.random() < 0.3:
            fields.append(b"Transfer-Encoding: chunked")
            body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        else:
            fields.append(b"Content-Length: %d" % len(body))
    method = dice.choice([b"POST"] * 12 + [b"GET", b"HEAD", b"PUT", b"OPTIONS", b"CONNECT", b"BREW"])
    path = dice.choice(
        [b"/v1/completions"] * 20 + [b"/v1/chat/completions", b"/health", b"/v1/models", b"/v1/models/%00", b"*",
         b"/%ff",          b"http://lb/health", b"/" + b"a" * 300, b"//", b"lb:80"]
    )  # fmt: skip
    raw = bytearray(
        b"%b %b HTTP/1.%d\r\n" % (method, path, dice.random() < 0.95) + b"\r\n".join([*fields, b"", b""]) + body
    )
    for _ in range(dice.choice([0, 0, 0, 0, 1, 1, 3, 20])):
        at = dice.randrange(len(raw))
        kind = dice.randrange(4)
        if kind == 0:
            raw[at] = dice.choice(b"\r\n\0 :;,\x80\xff0Aa")
        elif kind == 1:
            del raw[at : at + dice.randrange(1, 9)]
        elif kind == 2:
            raw[at:at] = dice.randbytes(dice.randrange(1, 9))
        else:
            raw[at:at] = raw[at : at + dice.randrange(1, 200)]
        raw = raw or bytearray(b"\n")
    return bytes(raw)


async def send_fuzzed(address: str, raw: bytes, last: bool) -> list[int]:
    """Returns the statuses received until the peer closes, which ``last`` asks it to do; without it we close first."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(raw + LAST if last else raw)
    if not last:
        with contextlib.suppress(OSError):
            writer.write_eof()
    try:
        async with asyncio.timeout(WAIT_S):
            answer = await reader.read()
    except ConnectionError:
        answer = b""
    finally:
        writer.close()
    return [int(status) for status in re.findall(rb"(?:\A|\}|\n)HTTP/1\.1 (\d\d\d) ", answer)]
