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
from pinyon.transfer.types.nic import Path
from pinyon.transfer.types.request import Opcode, Reason, TransferStatus
from pinyon.transfer.types.segment import Range

_log = logging.getLogger(__name__)


class LocalTransport(Transport):
    """A copy by memcpy, or by the driver where the target of a WRITE or the source of a READ is on a device."""

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
            if stopped.is_set():
                return GONE
            if self._clock() > chain.deadline:
                return LATE
            here = chain.regions[part.local].array[part.local_offset : part.local_offset + part.length]
            reads = chain.opcode is Opcode.READ
            if remote.device is not None:
                (remote.device.copy_out if reads else remote.device.copy_in)(part.remote_offset, here.data)
            else:
                there = remote.array[part.remote_offset : part.remote_offset + part.length]
                np.copyto(here if reads else there, there if reads else here)
        return None
