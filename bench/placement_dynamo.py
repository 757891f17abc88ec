"""Dynamo's radix tree and selection service, filled and asked as ``bench/placement.py`` fills and asks ours. The
program runs in an environment that has them, and nothing of ours.

The service is told of blocks over ZeroMQ, as workers tell it; the tree by events as JSON. A line of JSON comes back for
the fill, and one for each number of requests read from stdin."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import struct
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

BLOCK_TOKENS = 16
PROMPT_BLOCKS = 512
PROMPT_TOKENS = PROMPT_BLOCKS * BLOCK_TOKENS
PROMPTS = 4000
IN_FLIGHT = 2
"""The reservations in flight for each worker."""
VISIBLE_S = 120.0
"""The time in which the service must know what it was told."""
SMALL = bytes(byte & 127 for byte in range(256))
"""The tokens are below 128, so that each takes one byte in a message."""
INT64 = 1 << 63
MODEL = "model"


class Prompt(NamedTuple):
    tokens: bytes
    """The tokens, one byte each."""
    hashes: list[int]
    """The hashes of the blocks' tokens, not chained."""


def event_json(number: int, hashes: Sequence[int]) -> bytes:
    """Returns the tree's event that blocks were stored. Blocks are named after their hashes: no two are equal."""
    blocks = ",".join(f'{{"block_hash":{each ^ 1},"tokens_hash":{each}}}' for each in hashes)
    return (
        f'{{"event_id":{number},"data":{{"stored":{{"parent_hash":null,"blocks":[{blocks}]}}}},"dp_rank":0}}'.encode()
    )


def event_msgpack(tokens: bytes, names: Sequence[int]) -> bytes:
    """Returns the same event for the service, as vLLM sends it: ``[time, [["BlockStored", names, parent, tokens, block
    size, lora]], rank]``."""
    return b"".join(
        (
            b"\x93\xcb" + struct.pack(">d", 0.0) + b"\x91\x96\xabBlockStored\xdd" + struct.pack(">I", len(names)),
            *(b"\xcf" + struct.pack(">Q", name) for name in names),
            b"\xc0\xdd" + struct.pack(">I", len(tokens)) + tokens + bytes((BLOCK_TOKENS,)) + b"\xc0\xc0",
        )
    )


def signed(value: int) -> int:
    """Returns the signed number of the same 64 bits."""
    return value - 2 * INT64 if value >= INT64 else value


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Peer:
    def __init__(self, workers: int, blocks: int, seed: int, folder: str) -> None:
        self._core: Any = importlib.import_module("dynamo._core")
        self._zmq: Any = importlib.import_module("zmq")
        self._workers, self._blocks, self._dice, self._folder = workers, blocks, Random(seed), folder
        self._service = self._core.SelectionService(indexer_threads=4)
        self._tree = self._core.RadixTree()
        self._sockets: list[Any] = []
        self._seqs = [0] * workers
        self._prompts: list[Prompt] = []
        self._reserved: deque[str] = deque()
        self._reservations = 0

    def _prompt(self, shared: bytes = b"") -> bytes:
        return shared + self._dice.randbytes(PROMPT_TOKENS - len(shared)).translate(SMALL)

    def _hashed(self, tokens: bytes) -> Prompt:
        return Prompt(tokens, self._core.compute_block_hash_for_seq(list(tokens), BLOCK_TOKENS))

    async def start(self) -> None:
        loop, context = asyncio.get_running_loop(), self._zmq.Context()
        context.set(self._zmq.MAX_SOCKETS, self._workers + 1)
        for number in range(self._workers):
            socket = context.socket(self._zmq.XPUB)
            socket.setsockopt(self._zmq.SNDHWM, 0)
            socket.setsockopt(self._zmq.LINGER, 0)
            address = f"ipc://{self._folder}/{number}"
            socket.bind(address)
            self._sockets.append(socket)
            await self._service.upsert_worker(
                {
                    "worker_id": number,
                    "model_name": MODEL,
                    "block_size": BLOCK_TOKENS,
                    "total_kv_blocks": 2 * self._blocks // self._workers + 20_000,
                    "max_num_batched_tokens": PROMPT_TOKENS,
                    "endpoint": f"http://127.0.0.1:{number}",
                    "kv_events_endpoint": address,
                }
            )
        for socket in self._sockets:  # until each listener is there
            await asyncio.wait_for(loop.run_in_executor(None, socket.recv), VISIBLE_S)

    async def fill(self) -> dict[str, float]:
        """Fills both with the same blocks, and returns what a block takes of memory in each."""
        parts: list[tuple[Prompt, list[int]]] = []
        share = min(1.0, PROMPTS * PROMPT_BLOCKS / self._blocks)
        for _ in range(self._blocks // PROMPT_BLOCKS):
            prompt = self._hashed(self._prompt())
            count = 1 + (self._dice.random() < 0.2) * self._dice.randint(1, 3)
            parts.append((prompt, self._dice.sample(range(self._workers), min(count, self._workers))))
            if self._dice.random() < share:
                self._prompts.append(prompt)
        stored = sum(len(numbers) for _, numbers in parts) * PROMPT_BLOCKS
        before = resident_bytes()
        tree_s = 0.0
        for at, (prompt, numbers) in enumerate(parts):
            event = event_json(at, prompt.hashes)
            began_s = time.perf_counter()
            for number in numbers:
                self._tree.apply_event(number, event)
            tree_s += time.perf_counter() - began_s
        began_s = time.perf_counter()
        self._tree.find_matches([1])  # returns once all earlier events are applied
        tree_s += time.perf_counter() - began_s
        between = resident_bytes()
        cpu_s = time.process_time()
        for prompt, numbers in parts:
            event = event_msgpack(prompt.tokens, [each ^ 1 for each in prompt.hashes])
            for number in numbers:
                self._sockets[number].send_multipart([b"", struct.pack(">Q", self._seqs[number]), event])
                self._seqs[number] += 1
        last = {number: prompt for prompt, numbers in parts for number in numbers}
        for number, prompt in last.items():
            await self._known(number, prompt)
        cpu_s = time.process_time() - cpu_s
        after = resident_bytes()
        blocks = len(parts) * PROMPT_BLOCKS
        return {
            "blocks": blocks,
            "tree_bytes_per_block": round((between - before) / blocks, 1),
            "tree_stored_per_s": round(stored / tree_s),
            "service_bytes_per_block": round((after - between) / blocks, 1),
            "service_stored_per_cpu_s": round(stored / cpu_s),
        }

    async def _known(self, number: int, prompt: Prompt) -> None:
        """Waits until the service knows the last prompt that it was told of this worker."""
        until_s = time.monotonic() + VISIBLE_S
        while await self._held(number, prompt) < PROMPT_BLOCKS:
            if time.monotonic() > until_s:
                raise RuntimeError(f"the service did not take the events of worker {number}")
            await asyncio.sleep(0.05)

    async def _held(self, number: int, prompt: Prompt) -> int:
        scores = await self._service.overlap_scores({"model_name": MODEL, "token_ids": list(prompt.tokens)})
        return max((each["device_blocks"] for each in scores["workers"] if each["worker_id"] == number), default=0)

    async def turn(self, requests: int) -> dict[str, Any]:
        """Returns the µs of each request, half of which some worker holds, and the CPU of all threads. The service also
        books what it selects, as our decision does."""
        taken: dict[str, Any] = {}
        asked = [self._request() for _ in range(requests)]
        best = []

        async def find(prompt: Prompt) -> Callable[[], None]:
            matches = self._tree.find_matches(prompt.hashes)
            return lambda: best.append(max(matches.scores.values(), default=0))

        async def select(prompt: Prompt, **named: Any) -> None:
            await self._service.select_and_reserve({"model_name": MODEL, "selection_id": self._reserve(), **named})

        async def by_tokens(prompt: Prompt) -> None:
            await select(prompt, token_ids=tokens[prompt.tokens])

        async def by_hashes(prompt: Prompt) -> None:
            names = hashes[prompt.tokens]
            await select(prompt, block_hashes=names, sequence_hashes=names, isl_tokens=PROMPT_TOKENS)

        tokens = {prompt.tokens: list(prompt.tokens) for prompt in asked}
        hashes = {prompt.tokens: [signed(each) for each in prompt.hashes] for prompt in asked}
        for name, ask in (("tree", find), ("tokens", by_tokens), ("hashes", by_hashes)):
            times_us, cpu_s = [], 0.0
            for prompt in asked:
                before_s, began_ns = time.process_time(), time.perf_counter_ns()
                after = await ask(prompt)
                times_us.append((time.perf_counter_ns() - began_ns) / 1e3)
                cpu_s += time.process_time() - before_s
                if after is not None:
                    after()
                await self._release()
            taken |= {f"{name}_us": times_us, f"{name}_cpu_us": 1e6 * cpu_s / requests}
        if set(best) != {PROMPT_BLOCKS // 2}:
            raise RuntimeError(f"the tree found {sorted(set(best))} blocks, not half of each prompt")
        names = hashes[asked[0].tokens]
        scores = await self._service.overlap_scores(
            {"model_name": MODEL, "block_hashes": names, "sequence_hashes": names, "isl_tokens": PROMPT_TOKENS}
        )
        if max(each["device_blocks"] for each in scores["workers"]) != PROMPT_BLOCKS // 2:
            raise RuntimeError("the service did not find half of a prompt")
        return taken

    def _request(self) -> Prompt:
        return self._hashed(self._prompt(self._dice.choice(self._prompts).tokens[: PROMPT_TOKENS // 2]))

    def _reserve(self) -> str:
        self._reservations += 1
        self._reserved.append(f"selection-{self._reservations}")
        return self._reserved[-1]

    async def _release(self) -> None:
        while len(self._reserved) > IN_FLIGHT * self._workers:
            await self._service.free_reservation(self._reserved.popleft())

    def close(self) -> None:
        self._service.shutdown()
        for socket in self._sockets:
            socket.close()


async def main(workers: int, blocks: int, seed: int) -> None:
    loop = asyncio.get_running_loop()
    with tempfile.TemporaryDirectory() as folder:
        peer = Peer(workers, blocks, seed, folder)
        await peer.start()
        answer: dict[str, Any] = await peer.fill()
        while True:
            print(json.dumps(answer), flush=True)
            line = await loop.run_in_executor(None, sys.stdin.readline)
            if not line.strip():
                break
            answer = await peer.turn(int(line))
        peer.close()


if __name__ == "__main__":
    importlib.import_module("uvloop").run(main(*map(int, sys.argv[1:])))
