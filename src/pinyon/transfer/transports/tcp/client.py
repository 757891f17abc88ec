"""The initiator's end of a tcp link: frames out of chains, one at a time."""

from __future__ import annotations

import itertools

from pinyon.transfer.chain import Chain, Outcome
from pinyon.transfer.errors import WireError
from pinyon.transfer.links.dialer import Link
from pinyon.transfer.links.endpoint import Endpoint
from pinyon.transfer.request import Opcode, Reason, TransferStatus
from pinyon.transfer.transports.tcp import wire
from pinyon.transfer.transports.tcp.checksum import checksum, seed_of
from pinyon.transfer.transports.tcp.payload import HEAD_START_BYTES, INBOX_BYTES, receive_payload, send_payload

__all__ = ["Connection"]

_SMALL_BYTES = INBOX_BYTES - wire.FRAME_HEADER_BYTES - wire.DESCRIPTOR_BYTES - wire.TRAILER_BYTES
"""A payload that is taken in together with its header, on both sides."""
_DONE = Outcome(TransferStatus.COMPLETED)
_BAD_CHECKSUM = Outcome(TransferStatus.FAILED, Reason.CHECKSUM)
_FAULT = Outcome(TransferStatus.FAILED, Reason.INTERNAL)


class Connection(Endpoint):
    """An authenticated link with the state of its frames."""

    __slots__ = ("_checked", "_frame_ids", "_inbox", "_stream")

    def __init__(self, link: Link, *, checked: bool) -> None:
        """``checked``: payloads carry a checksum."""
        super().__init__(link)
        self._stream = link.stream
        self._checked = checked
        self._frame_ids = itertools.count(1)
        self._inbox = memoryview(bytearray(INBOX_BYTES))
        """The reply's header, its refusals and the first bytes of its payload: one system call for a small answer."""

    def exchange(self, chain: Chain) -> Outcome:
        """One frame there, one answer back."""
        if chain.nbytes <= _SMALL_BYTES and len(chain.slices) == 1:
            return self._exchange_small(chain)
        deadline, slices, nbytes = chain.deadline, chain.slices, chain.nbytes
        frame = wire.Frame(chain.opcode, len(slices), next(self._frame_ids), nbytes, self._checked)
        head = wire.pack_frame(frame, [part[3:] for part in slices])
        seed = seed_of(head) if frame.checksum else None
        if chain.opcode is Opcode.READ:
            self._stream.send([head], deadline)
        else:
            send_payload(self._stream, head, _gather(chain, None), seed, deadline)
        got = self._stream.receive_some(self._inbox[:HEAD_START_BYTES], wire.FRAME_HEADER_BYTES, deadline)
        return self._answer(chain, frame, seed, got)

    def _exchange_small(self, chain: Chain) -> Outcome:
        """The same for one small slice, without a detour: here every call shows in the latency."""
        _, local, offset, remote_region, remote_offset, nbytes = chain.slices[0]
        opcode, stream, inbox, checked = chain.opcode, self._stream, self._inbox, self._checked
        memory = chain.regions[local].view[offset : offset + nbytes]
        frame_id = next(self._frame_ids)
        head = wire.pack_frame_of_one(
            wire.FRAME_MAGIC, opcode, checked, 1, frame_id, nbytes, remote_region, remote_offset, nbytes
        )
        seed = seed_of(head) if checked else None
        reading = opcode is Opcode.READ
        buffers: list[bytes | memoryview] = [head] if reading else [head, memory]
        if seed is not None and not reading:
            buffers.append(wire.pack_trailer(checksum([memory], seed)))
        stream.send(buffers, chain.deadline)
        # What a good answer looks like is worked out while it is on its way.
        payload = nbytes if reading else 0
        good = wire.pack_header(wire.FRAME_MAGIC, opcode | wire.REPLY_BIT, wire.ALL_OK, 1, frame_id, payload)
        at, end = len(good), len(good) + payload
        whole = end + wire.TRAILER_BYTES if checked and reading else end
        got = stream.receive_some(inbox, at, chain.deadline)
        self.answered = True
        if at <= got < whole and inbox[:at] == good:
            stream.receive((inbox[got:whole],), chain.deadline)
            got = whole
        if got != whole or inbox[:at] != good:
            return self._answer(chain, wire.Frame(opcode, 1, frame_id, nbytes, checked), seed, got)
        if reading:
            if seed is not None and checksum([inbox[at:end]], seed) != wire.parse_trailer(inbox[end:whole]):
                return _BAD_CHECKSUM
            memory[:] = inbox[at:end]
        return _DONE

    def _answer(self, chain: Chain, frame: wire.Frame, seed: int | None, got: int) -> Outcome:
        """The answer to ``frame``, of which ``got`` bytes are in the inbox."""
        self.answered = True
        inbox, at, deadline = self._inbox, wire.FRAME_HEADER_BYTES, chain.deadline
        refusals = None
        reply = wire.parse_reply(inbox, frame)
        if reply.code == wire.BAD_CHECKSUM:
            return _BAD_CHECKSUM
        if reply.code == wire.FAULT:
            return _FAULT
        if reply.code == wire.SOME_REFUSED:
            at += frame.requests
            if got < at:
                self._stream.receive([inbox[got:at]], deadline)
                got = at
            refusals = bytes(inbox[at - frame.requests : at])
            _check_refusals(chain, reply, refusals)
        if chain.opcode is Opcode.READ:
            if not receive_payload(self._stream, _gather(chain, refusals), seed, deadline, inbox[at:got]):
                return _BAD_CHECKSUM
        elif got > at:
            raise WireError("bytes after the reply")
        return _DONE if refusals is None else Outcome(TransferStatus.COMPLETED, Reason.NONE, refusals)


def _check_refusals(chain: Chain, reply: wire.Reply, refusals: bytes) -> None:
    wire.check_refusals(refusals)
    if chain.opcode is Opcode.READ:
        accepted = sum(part.length for part, code in zip(chain.slices, refusals, strict=True) if not code)
        if accepted != reply.payload:
            raise WireError("the reply's payload does not fit the accepted ranges")


def _gather(chain: Chain, refusals: bytes | None) -> list[memoryview]:
    """The chain's local memory in order, neighbours joined, without the refused slices."""
    if len(chain.slices) == 1 and refusals is None:
        _, local, offset, _, _, length = chain.slices[0]
        return [chain.regions[local].view[offset : offset + length]]
    buffers: list[memoryview] = []
    key, start, end = b"", 0, 0
    for position, (_, local, offset, _, _, length) in enumerate(chain.slices):
        if refusals is not None and refusals[position]:
            continue
        if offset == end and local == key:
            end += length
            continue
        if end:
            buffers.append(chain.regions[key].view[start:end])
        key, start, end = local, offset, offset + length
    if end:
        buffers.append(chain.regions[key].view[start:end])
    return buffers
