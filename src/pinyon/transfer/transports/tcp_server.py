"""The serving end of tcp links: frames in, registered memory read or written, answers out."""

from __future__ import annotations

import logging
import time

from pinyon.transfer import wire
from pinyon.transfer.checksum import seed_of
from pinyon.transfer.errors import WireError
from pinyon.transfer.limits import TransferLimits
from pinyon.transfer.request import Opcode
from pinyon.transfer.transports.acceptor import Inbound
from pinyon.transfer.transports.base import Meter
from pinyon.transfer.transports.memory import MemoryTable, Region
from pinyon.transfer.transports.tcp_payload import INBOX_BYTES, receive_payload, send_payload

__all__ = ["TcpService"]

_log = logging.getLogger(__name__)
_FIRST_BYTES = wire.FRAME_HEADER_BYTES + wire.DESCRIPTOR_BYTES
_SCRATCH_BYTES = 64 << 10


class TcpService:
    """Serves the frames of all inbound tcp links, each in its link's thread."""

    def __init__(self, memory: MemoryTable, limits: TransferLimits, meter: Meter) -> None:
        self._memory = memory
        self._limits = limits
        self._meter = meter

    def serve(self, inbound: Inbound) -> None:
        """A ``LinkService``: returns when the link is idle too long, evicted or closed in good order."""
        stream, limits = inbound.stream, self._limits
        inbox = memoryview(bytearray(INBOX_BYTES))
        while True:
            got = stream.poll(inbox)
            if got is None:
                inbound.rest()
                got = stream.await_some(inbox, time.monotonic() + limits.idle_s)
                if got and not inbound.work():
                    return
            if not got:
                return
            deadline = time.monotonic() + limits.base_deadline_s
            if got < _FIRST_BYTES:  # every frame has at least one descriptor
                stream.receive([inbox[got:_FIRST_BYTES]], deadline)
                got = _FIRST_BYTES
            frame = wire.parse_frame(inbox)
            deadline += frame.payload / limits.min_rate_bytes_s
            end = wire.FRAME_HEADER_BYTES + frame.requests * wire.DESCRIPTOR_BYTES
            if got >= end:
                head, early = inbox[:end], inbox[end:got]
            else:
                head, early = memoryview(bytearray(end)), inbox[:0]
                head[:got] = inbox[:got]
                stream.receive([head[got:]], deadline)
            self._serve_frame(inbound, frame, head, early, deadline)

    def _serve_frame(
        self, inbound: Inbound, frame: wire.Frame, head: memoryview, early: memoryview, deadline: float
    ) -> None:
        ranges = wire.parse_descriptors(head[wire.FRAME_HEADER_BYTES :], frame)
        seed = seed_of(head) if frame.checksum else None
        reading = frame.opcode == Opcode.READ
        if reading and early:
            raise WireError("bytes after a READ")
        intact = True
        found, refusals, pinned = self._memory.admit(frame.opcode, ranges, inbound, inbound.abort)
        try:
            accepted = frame.payload
            if refusals is not None:
                accepted = sum(part[2] for part, region in zip(ranges, found, strict=True) if region is not None)
            buffers = _gather(ranges, found, drain=not reading)
            if reading:
                send_payload(inbound.stream, wire.pack_reply(frame, refusals, accepted), buffers, seed, deadline)
            else:
                intact = receive_payload(inbound.stream, buffers, seed, deadline, early, singly=refusals is not None)
        finally:
            self._memory.unpin(pinned, inbound)
        if not intact:
            inbound.stream.send([wire.pack_reply(frame, None, 0, code=wire.BAD_CHECKSUM)], deadline)
            _log.warning("a transfer frame arrived with a wrong checksum")
            return
        if not reading:
            inbound.stream.send([wire.pack_reply(frame, refusals, 0)], deadline)
        with self._meter.lock:
            self._meter.served(frame.opcode, accepted, 0 if refusals is None else len(refusals) - refusals.count(0))


def _gather(ranges: list[wire.Descriptor], found: list[Region | None], *, drain: bool) -> list[memoryview]:
    """The memory of the accepted ranges, neighbours joined.

    Refused ranges are skipped, or with ``drain`` stand as scratch memory so that the stream stays in step.
    """
    if len(ranges) == 1 and found[0] is not None:
        _, offset, length = ranges[0]
        return [found[0].view[offset : offset + length]]
    buffers: list[memoryview] = []
    scratch: memoryview | None = None
    last: Region | None = None
    start = end = 0
    for (_, offset, length), region in zip(ranges, found, strict=True):
        if region is last and offset == end and region is not None:
            end += length
            continue
        if last is not None:
            buffers.append(last.view[start:end])
        last, start, end = region, offset, offset + length
        if region is None and drain:
            scratch = scratch or memoryview(bytearray(_SCRATCH_BYTES))
            whole, rest = divmod(length, _SCRATCH_BYTES)
            buffers += [scratch] * whole
            if rest:
                buffers.append(scratch[:rest])
    if last is not None:
        buffers.append(last.view[start:end])
    return buffers
