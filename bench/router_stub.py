"""Inference servers that compute nothing, behind routers that are measured. Several run in one process, each with a
model of a prefix cache, which says what of each prompt a real one would have had.

``python -m bench.router_stub SERVERS`` prints their ports as JSON; GET ``/resize/CHUNKS`` empties a server's cache and
sets its size. A request with the field ``stub_hold`` is a stream that goes on until a GET of ``/release``. Prompts are
what is posted to ``/v1/completions``. ``/tokenize`` is answered as by vLLM, since vllm-router chooses by tokens and
asks servers for them. GET ``/bare`` takes that away: then it chooses by characters. All other paths, such as
``/v1/completions/render`` that it tries first, are not there, as with a vLLM that was started without more."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import OrderedDict
from typing import Any, cast

import numpy as np
import uvloop
from xxhash import xxh3_64_intdigest

MODEL = "stub"
CHUNK_BYTES = 512
EVENTS = 16
EVENT_GAP_S = 0.001
HELD_GAP_S = 0.5
_WHOLE = json.dumps(
    {
        "id": "cmpl-1", "object": "text_completion", "created": 1, "model": MODEL,
        "choices": [{"index": 0, "text": " x", "logprobs": None, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10},
    }
).encode()  # fmt: skip
_EVENT = (
    b'data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"stub",'
    b'"choices":[{"index":0,"text":" x","logprobs":null,"finish_reason":null}]}\n\n'
)
_DONE = b"data: [DONE]\n\n"
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
_PAGES: dict[bytes, Any] = {
    b"/v1/models": {"object": "list", "data": [{"id": MODEL, "object": "model", "max_model_len": 131072}]},
    b"/health": {},
    b"/health_generate": {},
}


def tokenized(body: bytes) -> tuple[int, bytes]:
    """Returns the tokens of a prompt, four characters each, as of English in most vocabularies."""
    text = json.loads(body)["prompt"].encode()
    tokens = (np.frombuffer(text[: len(text) // 4 * 4], "<u4") % 100_000).tolist()
    return 200, json.dumps({"count": len(tokens), "max_model_len": 131072, "tokens": tokens}).encode()


class Stub:
    """One server; its cache holds ``chunks``."""

    def __init__(self, chunks: int = 0) -> None:
        self.chunks = chunks
        self.cache: OrderedDict[int, None] = OrderedDict()
        self.running = self.most = self.requests = self.others = self.asked = self.hits = 0
        self.tokenizes = True
        self.released = asyncio.Event()

    def serve(self, body: bytes) -> dict[str, Any]:
        """Counts the chunks of a prompt that are cached, and keeps all of them. Returns the request's fields."""
        values = cast("dict[str, Any]", json.loads(body))
        prompt = cast("str", values["prompt"]).encode()
        self.requests += 1
        cache, key, hitting = self.cache, 0, True
        for start in range(0, len(prompt) - CHUNK_BYTES + 1, CHUNK_BYTES):
            key = xxh3_64_intdigest(prompt[start : start + CHUNK_BYTES], key)
            self.asked += 1
            hitting = hitting and key in cache
            self.hits += hitting
            cache[key] = None
            cache.move_to_end(key)
        while len(cache) > self.chunks:
            cache.popitem(last=False)
        return values

    def page(self, path: bytes) -> tuple[int, bytes]:
        if path == b"/metrics":
            return 200, b"vllm:num_requests_running %d\nvllm:num_requests_waiting 0\n" % self.running
        if path == b"/stats":
            names = ("requests", "others", "asked", "hits", "running", "most")
            return 200, json.dumps({name: getattr(self, name) for name in names}).encode()
        if path == b"/release":
            self.released.set()
            return 200, b"{}"
        if path == b"/bare":
            self.tokenizes = False
            return 200, b"{}"
        if path.startswith(b"/resize/"):
            self.chunks = int(path.rpartition(b"/")[2])
            self.cache.clear()
            return 200, b"{}"
        known = _PAGES.get(path)
        return (404, b"{}") if known is None else (200, json.dumps(known).encode())


class Connection(asyncio.Protocol):
    def __init__(self, stub: Stub) -> None:
        self._stub = stub
        self._data = b""
        self._stream: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._stream is not None:
            self._stream.cancel()

    def data_received(self, data: bytes) -> None:
        self._data += data
        while True:
            end = self._data.find(b"\r\n\r\n")
            if end < 0:
                return
            head = self._data[:end].lower()
            at = head.find(b"\r\ncontent-length:")
            size = int(head[at + 17 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self._data) < end + 4 + size:
                return
            if self._data.startswith(b"PRI "):  # a router that probes for HTTP/2
                self._transport.close()
                return
            method, target, _ = self._data.split(b" ", 2)
            body, self._data = self._data[end + 4 : end + 4 + size], self._data[end + 4 + size :]
            if method != b"POST":
                self._whole(*self._stub.page(target.partition(b"?")[0]))
                continue
            if target != b"/v1/completions":
                self._stub.others += 1
                known = target == b"/tokenize" and self._stub.tokenizes
                self._whole(*(tokenized(body) if known else (404, b'{"detail":"Not Found"}')))
                continue
            values = self._stub.serve(body)
            if values.get("stream"):
                self._stream = asyncio.get_running_loop().create_task(self._events("stub_hold" in values))
            else:
                self._whole(200, _WHOLE)

    def _whole(self, status: int, body: bytes) -> None:
        head = b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (status, len(body))
        self._transport.write(head + body)

    async def _events(self, held: bool) -> None:
        stub, write = self._stub, self._transport.write
        stub.running += 1
        stub.most = max(stub.most, stub.running)
        event = b"%x\r\n%b\r\n" % (len(_EVENT), _EVENT)
        try:
            write(_STREAM_HEAD + event)
            if held:
                while not stub.released.is_set():
                    await asyncio.sleep(HELD_GAP_S)
                    write(event)
            else:
                for _ in range(EVENTS - 1):
                    await asyncio.sleep(EVENT_GAP_S)
                    write(event)
            write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(_DONE), _DONE))
        finally:
            stub.running -= 1


async def main(servers: int) -> None:
    loop = asyncio.get_running_loop()
    ports = []
    for _ in range(servers):
        stub = Stub()
        server = await loop.create_server(lambda stub=stub: Connection(stub), "127.0.0.1", 0, backlog=4096)  # type: ignore[misc]
        ports.append(server.sockets[0].getsockname()[1])
    print(json.dumps(ports), flush=True)
    await asyncio.to_thread(sys.stdin.read)  # until the starting process ends


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1])))
