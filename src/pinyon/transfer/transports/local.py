"""Transfers within the engine's own segment: a copy inside one process, with the same checks as for a peer."""

from __future__ import annotations

import logging
import threading

import numpy as np

from pinyon.transfer.chains.chain import GONE, INTERNAL, LATE, Chain, ChainOutcome
from pinyon.transfer.links.context import EngineContext
from pinyon.transfer.memory.device import DeviceError
from pinyon.transfer.memory.region import Region
from pinyon.transfer.transports.base import Transport
from pinyon.transfer.types.path import Path
from pinyon.transfer.types.request import Opcode, Reason, TransferStatus
from pinyon.transfer.types.segment import Range

_log = logging.getLogger(__name__)
_PIECE_BYTES = 8 << 20
"""The bytes that are copied between two checks for a stop or the deadline."""


class LocalTransport(Transport):
    """A copy by memcpy, or by the driver where the target of a WRITE or the source of a READ is on a device."""

    name = "local"
    endpoints = 0

    def __init__(self, context: EngineContext) -> None:
        self._memory = context.memory
        self._clock = context.clock

    def run(self, chain: Chain, path: Path) -> ChainOutcome:
        stopped = threading.Event()
        if not chain.claim(stopped.set):
            return GONE
        asked = [Range(part.remote_region, part.remote_offset, part.length) for part in chain.slices]
        found, refusals, pinned = self._memory.admit(chain.opcode, asked, stopped, stopped.set)
        try:
            outcome = self._copy(chain, found, stopped) or ChainOutcome(TransferStatus.COMPLETED, Reason.NONE, refusals)
        except DeviceError as error:
            _log.error("copying to or from a device failed: %s", error)
            outcome = INTERNAL
        finally:
            self._memory.unpin(pinned, stopped)
        chain.unclaim()
        return outcome

    def _copy(self, chain: Chain, found: list[Region | None], stopped: threading.Event) -> ChainOutcome | None:
        for part, remote in zip(chain.slices, found, strict=True):
            if remote is None:
                continue
            here = chain.regions[part.local].array[part.local_offset : part.local_offset + part.length]
            copy = None
            source = target = here
            if remote.device is not None:
                copy = remote.device.copy_out if chain.opcode is Opcode.READ else remote.device.copy_in
            else:
                there = remote.array[part.remote_offset : part.remote_offset + part.length]
                source, target = (there, here) if chain.opcode is Opcode.READ else (here, there)
            if part.length <= _PIECE_BYTES or (copy is None and np.may_share_memory(source, target)):
                pieces = [(0, part.length)]  # numpy copies overlapping ranges correctly only in one call
            else:
                pieces = [(at, min(at + _PIECE_BYTES, part.length)) for at in range(0, part.length, _PIECE_BYTES)]
            for start, end in pieces:
                if stopped.is_set():
                    return GONE
                if self._clock() > chain.deadline:
                    return LATE
                if copy is None:
                    np.copyto(target[start:end], source[start:end])
                else:
                    copy(part.remote_offset + start, here[start:end].data)
        return None
