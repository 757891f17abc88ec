"""Mooncake's transfer engine as one side of a transfer, in an environment that has the engine, and not pinyon."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from bench.transfer_side import WRITE, Block, Initiator, Memory, run


def _engine(memory: Memory) -> Any:
    engine = importlib.import_module("mooncake.engine").TransferEngine()
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
        raise RuntimeError("the engine did not start")
    if engine.register_memory(memory.address, memory.nbytes) != 0:
        raise RuntimeError("the engine did not take the memory")
    return engine


class MooncakeTarget:
    def __init__(self, memory: Memory, option: str) -> None:
        self.memory = memory
        self._engine = _engine(memory)

    def address(self) -> dict[str, Any]:
        return {"session": f"127.0.0.1:{self._engine.get_rpc_port()}", "base": self.memory.address}

    def close(self) -> None:
        self._engine.unregister_memory(self.memory.address)


class MooncakeInitiator(Initiator):
    def __init__(self, memory: Memory, option: str, address: dict[str, Any]) -> None:
        self.memory = memory
        self._engine = _engine(memory)
        self._session: str = address["session"]
        self._base: int = address["base"]

    def prepare(self, opcode: str, blocks: Sequence[Block]) -> Callable[[], None]:
        engine, session = self._engine, self._session
        local = [self.memory.address + block[0] for block in blocks]
        remote = [self._base + block[1] for block in blocks]
        lengths = [block[2] for block in blocks]
        if len(blocks) == 1:
            move = engine.transfer_sync_write if opcode == WRITE else engine.transfer_sync_read
            arguments: tuple[Any, ...] = (session, local[0], remote[0], lengths[0])
        else:
            move = engine.batch_transfer_sync_write if opcode == WRITE else engine.batch_transfer_sync_read
            arguments = (session, local, remote, lengths)

        def call() -> None:
            status = move(*arguments)
            if status != 0:
                raise RuntimeError(f"the transfer ended with status {status}")

        return call

    def close(self) -> None:
        self._engine.unregister_memory(self.memory.address)


if __name__ == "__main__":
    run(MooncakeTarget, MooncakeInitiator)
