"""NIXL's agent with its UCX back end as one side of a transfer. It runs in an environment that has it, and not pinyon.

``option`` is what UCX may use: ``shm`` (shared memory and cross-memory attach) or ``tcp``. A call posts a prepared
transfer, as a serving engine does that knows its blocks, and polls until it is done."""

from __future__ import annotations

import base64
import importlib
import os
from collections.abc import Callable, Sequence
from typing import Any

from bench.transfer_side import WRITE, Block, Initiator, Memory, Unavailable, run

_TLS = {"shm": "self,shm,tcp", "tcp": "self,tcp"}


def _agent(name: str, memory: Memory, option: str) -> Any:
    os.environ["UCX_TLS"] = _TLS[option]
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    api = importlib.import_module("nixl_cu12._api")
    agent = api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"]))
    if "UCX" not in agent.backends:
        raise Unavailable("it has no UCX here")
    agent.register_memory([(memory.address, memory.nbytes, 0, "")], "DRAM")
    return agent


class NixlTarget:
    def __init__(self, memory: Memory, option: str) -> None:
        self.memory = memory
        self._agent = _agent("target", memory, option)

    def address(self) -> dict[str, Any]:
        return {"metadata": base64.b64encode(self._agent.get_agent_metadata()).decode(), "base": self.memory.address}

    def close(self) -> None:
        pass


class NixlInitiator(Initiator):
    def __init__(self, memory: Memory, option: str, address: dict[str, Any]) -> None:
        self.memory = memory
        self._agent = _agent("initiator", memory, option)
        self._peer = self._agent.add_remote_agent(base64.b64decode(address["metadata"]))
        if isinstance(self._peer, bytes):
            self._peer = self._peer.decode()
        self._base: int = address["base"]

    def prepare(self, opcode: str, blocks: Sequence[Block]) -> Callable[[], None]:
        agent = self._agent
        local = agent.get_xfer_descs([(self.memory.address + here, size, 0) for here, _, size in blocks], "DRAM")
        remote = agent.get_xfer_descs([(self._base + there, size, 0) for _, there, size in blocks], "DRAM")
        handle = agent.initialize_xfer("WRITE" if opcode == WRITE else "READ", local, remote, self._peer)
        post, state_of = agent.transfer, agent.check_xfer_state

        def call() -> None:
            state = post(handle)
            while state == "PROC":
                state = state_of(handle)
            if state != "DONE":
                raise RuntimeError(f"the transfer ended in state {state}")

        return call

    def close(self) -> None:
        pass


if __name__ == "__main__":
    run(NixlTarget, NixlInitiator)
