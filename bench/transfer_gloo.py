"""torch.distributed's Gloo as one side of a transfer. It runs in an environment that has PyTorch, and not pinyon.

Gloo's transfers are two-sided, so a small message first tells the target of each call. The target posts its part of
every block at once, as the initiator does, and for a WRITE says when all is there."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

from bench.transfer_side import WRITE, Block, Initiator, Memory, run

_INITIATOR, _TARGET = 0, 1
_MOST_BLOCKS = 1024
_END, _WRITE, _READ = 0, 1, 2


def _bytes_of(torch: Any, memory: Memory) -> Any:
    return torch.frombuffer(memory.map, dtype=torch.uint8)


class GlooTarget:
    def __init__(self, memory: Memory, option: str) -> None:
        self.memory = memory
        self._torch = importlib.import_module("torch")
        self._group = importlib.import_module("torch.distributed")
        self._store = self._group.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def address(self) -> dict[str, Any]:
        return {"port": self._store.port}

    def _serve(self) -> None:
        torch, group = self._torch, self._group
        group.init_process_group("gloo", store=self._store, rank=_TARGET, world_size=2)
        data = _bytes_of(torch, self.memory)
        head = torch.zeros(2 + 2 * _MOST_BLOCKS, dtype=torch.int64)
        done = torch.zeros(1, dtype=torch.uint8)
        while True:
            group.recv(head, src=_INITIATOR)
            kind, count, *ranges = head.tolist()
            if kind == _END:
                return
            blocks = [data[ranges[2 * at] : ranges[2 * at] + ranges[2 * at + 1]] for at in range(count)]
            move = group.irecv if kind == _WRITE else group.isend
            for work in [move(block, _INITIATOR) for block in blocks]:
                work.wait()
            if kind == _WRITE:
                group.send(done, _INITIATOR)

    def close(self) -> None:
        self._thread.join(5.0)


class GlooInitiator(Initiator):
    def __init__(self, memory: Memory, option: str, address: dict[str, Any]) -> None:
        self.memory = memory
        self._torch = torch = importlib.import_module("torch")
        self._group = importlib.import_module("torch.distributed")
        store = self._group.TCPStore("127.0.0.1", address["port"], 2, is_master=False)
        self._group.init_process_group("gloo", store=store, rank=_INITIATOR, world_size=2)
        self._data = _bytes_of(torch, memory)
        self._done = torch.zeros(1, dtype=torch.uint8)

    def _head(self, kind: int, blocks: Sequence[Block]) -> Any:
        head = self._torch.zeros(2 + 2 * _MOST_BLOCKS, dtype=self._torch.int64)
        numbers = [kind, len(blocks), *(number for _, there, size in blocks for number in (there, size))]
        head[: len(numbers)] = self._torch.tensor(numbers)
        return head

    def prepare(self, opcode: str, blocks: Sequence[Block]) -> Callable[[], None]:
        group, done, writing = self._group, self._done, opcode == WRITE
        head = self._head(_WRITE if writing else _READ, blocks)
        local = [self._data[here : here + size] for here, _, size in blocks]
        move = group.isend if writing else group.irecv

        def call() -> None:
            group.send(head, _TARGET)
            for work in [move(block, _TARGET) for block in local]:
                work.wait()
            if writing:
                group.recv(done, _TARGET)

        return call

    def close(self) -> None:
        self._group.send(self._head(_END, ()), _TARGET)


if __name__ == "__main__":
    run(GlooTarget, GlooInitiator)
