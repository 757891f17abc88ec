"""pinyon's transfer engine as one side of a transfer.

``option`` is the transport that is forced, or ``auto``. ``off`` may follow after a comma: no checksums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bench.transfer_side import WRITE, Block, Initiator, Memory, Unavailable, run
from pinyon.api.common.v1 import common_pb2
from pinyon.messages.segment import segment_from_proto, segment_to_proto
from pinyon.transfer import Opcode, TransferEngine, TransferError, TransferRequest, Transports, raise_for_failure


def _engine(option: str) -> TransferEngine:
    transport, _, checksum = option.partition(",")
    forced = None if transport == "auto" else (transport,)
    try:
        engine = TransferEngine(host="127.0.0.1", transports=Transports(forced, checksum=checksum or "on"))
    except TransferError as error:
        raise Unavailable(str(error)) from None
    engine.start()
    return engine


class PinyonTarget:
    def __init__(self, memory: Memory, option: str) -> None:
        self.memory = memory
        self._engine = _engine(option)
        self._engine.register_local_memory(memory.map)

    def address(self) -> dict[str, Any]:
        return {"segment": segment_to_proto(self._engine.descriptor()).SerializeToString().hex()}

    def close(self) -> None:
        self._engine.close()


class PinyonInitiator(Initiator):
    def __init__(self, memory: Memory, option: str, address: dict[str, Any]) -> None:
        self.memory = memory
        self._engine = _engine(option)
        self._local = self._engine.register_local_memory(memory.map).key
        self._remote = segment_from_proto(common_pb2.Segment.FromString(bytes.fromhex(address["segment"])))

    def prepare(self, opcode: str, blocks: Sequence[Block]) -> Callable[[], None]:
        code = Opcode.WRITE if opcode == WRITE else Opcode.READ
        remote = self._remote
        region = remote.regions[0].key
        requests = [TransferRequest(code, self._local, here, remote, region, there, n) for here, there, n in blocks]
        transfer = self._engine.transfer

        def call() -> None:
            raise_for_failure(transfer(requests))

        return call

    def close(self) -> None:
        self._engine.close()


if __name__ == "__main__":
    run(PinyonTarget, PinyonInitiator)
