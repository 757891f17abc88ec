"""The serving end of tcp links: frames in, registered memory read or written, answers out."""

from __future__ import annotations

import logging

from pinyon.transfer.links.acceptor import InboundLink
from pinyon.transfer.links.context import EngineContext
from pinyon.transfer.memory.device import DeviceError
from pinyon.transfer.memory.region import Region
from pinyon.transfer.transports.staged import stage_ranges
from pinyon.transfer.transports.tcp import wire
from pinyon.transfer.transports.tcp.payload import HEAD_START_BYTES, INBOX_BYTES, receive_payload, send_payload
from pinyon.transfer.transports.tcp.wire import checksum_of, seed_of
from pinyon.transfer.types.errors import WireError
from pinyon.transfer.types.request import Opcode
from pinyon.transfer.types.segment import Range

_log = logging.getLogger(__name__)
_SCRATCH_BYTES = 64 << 10


class TcpService:
    """The service for the frames of all inbound tcp links, each in its link's thread."""

    def __init__(self, context: EngineContext) -> None:
        self._memory = context.memory
        self._limits = context.limits
        self._meter = context.meter
        self._clock = context.clock

    def serve(self, inbound: InboundLink) -> None:
        """Serves a link as a ``LinkService``: returns when it is idle too long, evicted or closed in good order."""
        stream, limits = inbound.stream, self._limits
        inbox, outbox = memoryview(bytearray(INBOX_BYTES)), memoryview(bytearray(INBOX_BYTES))
        window = inbox
        while True:
            got = stream.poll(window)
            if got is None:
                got = inbound.await_request(window)
            if not got:
                return
            deadline = self._clock() + limits.base_deadline_s
            got = self._serve_small(inbound, inbox, got, outbox, deadline)
            if not got:
                window = inbox
                continue
            if got < wire.FIRST_BYTES:
                stream.receive([inbox[got : wire.FIRST_BYTES]], deadline)
                got = wire.FIRST_BYTES
            window = inbox[:HEAD_START_BYTES]
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

    def _serve_small(
        self, inbound: InboundLink, inbox: memoryview, got: int, outbox: memoryview, deadline: float
    ) -> int:
        """Serves the usual small frame: one granted range, all of it in the inbox, with as few calls as possible.

        Returns 0 when the frame is served. Otherwise nothing was done, and the result is how many bytes are in the
        inbox now."""
        if got < wire.FIRST_BYTES:
            return got
        nbytes: int
        magic, opcode, checked, count, frame_id, nbytes, key, offset, length = wire.unpack_frame_of_one(inbox)
        if magic != wire.FRAME_MAGIC or count != 1 or not 0 < length == nbytes < INBOX_BYTES or checked > 1:
            return got
        end = wire.FIRST_BYTES + nbytes
        if opcode == wire.WRITE:
            whole = end + wire.TRAILER_BYTES if checked else end
            if got > whole or whole > INBOX_BYTES:
                return got
            if got < whole:
                inbound.stream.receive((inbox[got:whole],), deadline)
            data = inbox[wire.FIRST_BYTES : end]
            seed = seed_of(inbox[: wire.FIRST_BYTES]) if checked else 0
            if checked and checksum_of(data, seed) != wire.parse_trailer(inbox[end:whole]):
                return whole
            if not self._memory.put(key, offset, data):
                return whole
            reply: bytes | memoryview = wire.pack_header(magic, wire.WRITE_DONE, wire.ALL_OK, 1, frame_id, 0)
        elif opcode == wire.READ:
            at = wire.FRAME_HEADER_BYTES
            whole = at + nbytes + wire.TRAILER_BYTES
            if got != wire.FIRST_BYTES or whole > INBOX_BYTES:
                return got
            end = at + nbytes
            data = outbox[at:end]
            if not self._memory.take(key, offset, data):
                return got
            wire.pack_header_into(outbox, 0, magic, wire.READ_DONE, wire.ALL_OK, 1, frame_id, nbytes)
            if checked:
                wire.pack_trailer_into(outbox, end, checksum_of(data, seed_of(inbox[: wire.FIRST_BYTES])))
                end += wire.TRAILER_BYTES
            reply = outbox[:end]
        else:
            return got
        inbound.stream.send_one(reply, deadline)
        with self._meter.lock:
            self._meter.served(opcode, nbytes)
        return 0

    def _serve_frame(
        self, inbound: InboundLink, frame: wire.Frame, head: memoryview, early: memoryview, deadline: float
    ) -> None:
        ranges = wire.parse_descriptors(head[wire.FRAME_HEADER_BYTES :], frame)
        seed = seed_of(head) if frame.checksum else None
        reading = frame.opcode == Opcode.READ
        if reading and early:
            raise WireError("bytes after a READ")
        code = wire.ALL_OK
        found, refusals, pinned = self._memory.admit(frame.opcode, ranges, inbound, inbound.abort)
        staged = None
        landing = False
        accepted = frame.payload
        try:
            if refusals is not None:
                accepted = sum(part[2] for part, region in zip(ranges, found, strict=True) if region is not None)
            if self._memory.staging_in.regions:
                patience = min(deadline, self._clock() + self._limits.stall_s)
                staged = stage_ranges(self._memory.staging_in, frame.opcode, ranges, found, patience)
                if staged is not None:
                    ranges, found = staged.ranges, staged.found
            buffers = _gather(ranges, found, drain=not reading)
            if reading:
                if seed is None:
                    inbound.stream.keep_little()
                send_payload(inbound.stream, wire.pack_reply(frame, refusals, accepted), buffers, seed, deadline)
            else:
                if not receive_payload(inbound.stream, buffers, seed, deadline, early, singly=refusals is not None):
                    code = wire.BAD_CHECKSUM
                landing = True
                if staged is not None and code == wire.ALL_OK:
                    staged.land()
        except DeviceError as error:  # a READ failed before its reply, a WRITE after its payload: the link is in step
            _log.error("serving device memory failed: %s", error)
            if not reading and not landing:  # its payload is still to come
                raise ConnectionAbortedError from None
            code = wire.FAULT
        finally:
            if staged is not None:
                staged.buffer.release()
            self._memory.unpin(pinned, inbound)
        if code != wire.ALL_OK:
            inbound.stream.send([wire.pack_reply(frame, None, 0, code=code)], deadline)
            if code == wire.BAD_CHECKSUM:
                _log.warning("a transfer frame arrived with a wrong checksum")
            return
        if not reading:
            if seed is None:
                inbound.stream.keep_little()
            inbound.stream.send([wire.pack_reply(frame, refusals, 0)], deadline)
        with self._meter.lock:
            self._meter.served(frame.opcode, accepted, refusals)


def _gather(ranges: list[Range], found: list[Region | None], *, drain: bool) -> list[memoryview]:
    """Returns the memory of the accepted ranges, with neighbours joined.

    Refused ranges are skipped, or with ``drain`` replaced by scratch memory so that the stream stays in step."""
    if len(ranges) == 1 and found[0] is not None:
        _, offset, length = ranges[0]
        return [found[0].view[offset : offset + length]]
    buffers: list[memoryview] = []
    scratch: memoryview | None = None
    last: Region | None = None
    view = memoryview(b"")
    start = end = 0
    for position, (_, offset, length) in enumerate(ranges):
        region = found[position]
        if region is last and offset == end and region is not None:
            end += length
            continue
        if last is not None:
            buffers.append(view[start:end])
        if region is not None and region is not last:
            view = region.view
        last, start, end = region, offset, offset + length
        if region is None and drain:
            scratch = scratch or memoryview(bytearray(_SCRATCH_BYTES))
            whole, rest = divmod(length, _SCRATCH_BYTES)
            buffers += [scratch] * whole
            if rest:
                buffers.append(scratch[:rest])
    if last is not None:
        buffers.append(view[start:end])
    return buffers
