"""The tcp transport: threads with blocking sockets, payload straight between sockets and registered memory.

It uses threads, not asyncio, because the process's event loop and its engine thread share the GIL. Here a megabyte
costs a few system calls, during which the GIL is free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Final

from pinyon.transfer.chains.chain import DONE, INTERNAL, SHUTDOWN, UNDER_WAY, Chain, ChainOutcome
from pinyon.transfer.chains.slicing import Slice
from pinyon.transfer.links.context import EngineContext
from pinyon.transfer.links.dialer import Link, dial
from pinyon.transfer.links.endpoint import Endpoint
from pinyon.transfer.links.endpoints import Endpoints
from pinyon.transfer.links.handshake import Service
from pinyon.transfer.memory.region import Region
from pinyon.transfer.memory.table import MemoryTable
from pinyon.transfer.transports.tcp import wire
from pinyon.transfer.transports.tcp.payload import HEAD_START_BYTES, INBOX_BYTES, receive_payload, send_payload
from pinyon.transfer.transports.tcp.server import TcpService
from pinyon.transfer.transports.tcp.wire import checksum_of, seed_of
from pinyon.transfer.types.errors import WireError
from pinyon.transfer.types.nic import Nic, Path
from pinyon.transfer.types.request import Opcode, Reason, TransferStatus
from pinyon.transfer.types.segment import SegmentDescriptor

SMALL_BYTES: Final = INBOX_BYTES - wire.FIRST_BYTES - wire.TRAILER_BYTES
"""The largest payload that is received together with its header, on both sides."""
_there: Final[Callable[[Slice], tuple[bytes, int, int]]] = itemgetter(3, 4, 5)
"""The getter of a slice's key, offset and length, as the peer is told."""
_BAD_CHECKSUM: Final = ChainOutcome(TransferStatus.FAILED, Reason.CHECKSUM)


_Asked = tuple[Opcode, Region, int, int, int, int, bytes]
"""A slice under way: direction, local region, offset, length; and the good answer's checksum seed, length, header."""


class Connection(Endpoint):
    """The initiator's end of a tcp link, which sends chains as frames, one at a time."""

    __slots__ = ("_asked", "_checked", "_frame_id", "_got", "_inbox", "_memory", "_outbox", "_stream")

    def __init__(self, link: Link, memory: MemoryTable, *, checked: bool) -> None:
        """Sets up the state of the link; with ``checked``, payloads carry a checksum."""
        super().__init__(link)
        self._stream = link.stream
        self._memory = memory
        self._checked = checked
        if not checked:
            link.stream.keep_little()
        self._frame_id = 0
        self._asked: _Asked | None = None
        self._got = 0
        """The bytes of its answer in the inbox, while :meth:`proceed` collects them."""
        self._inbox = memoryview(bytearray(INBOX_BYTES))
        """The reply's header, refusals and first bytes of payload, so that one system call takes a small answer."""
        self._outbox = memoryview(bytearray())
        """The frame of a small WRITE, from the first one on. Local memory is touched only while it is copied here."""

    def exchange(self, chain: Chain) -> ChainOutcome:
        """Sends one frame and receives its answer."""
        deadline, slices, nbytes = chain.deadline, chain.slices, chain.nbytes
        checked = self._checked and chain.checksum
        if not checked:
            self._stream.keep_little()
        if len(slices) == 1 and checked == self._checked:
            _, local, offset, key, remote_offset, _ = slices[0]
            outcome = self.move(chain.opcode, chain.regions[local], offset, key, remote_offset, nbytes, deadline)
            assert outcome is not None
            return outcome
        self._frame_id += 1
        frame = wire.Frame(chain.opcode, len(slices), self._frame_id, nbytes, checked)
        head = wire.pack_frame(frame, map(_there, slices))
        seed = seed_of(head) if frame.checksum else None
        if chain.opcode is Opcode.READ:
            self._stream.send([head], deadline)
        else:
            send_payload(self._stream, head, _gather(chain, None), seed, deadline)
        got = self._stream.receive_some(self._inbox[:HEAD_START_BYTES], wire.FRAME_HEADER_BYTES, deadline)
        return self._answer(frame, seed, got, deadline, chain)

    def begin(
        self, opcode: Opcode, region: Region, offset: int, key: bytes, remote_offset: int, nbytes: int, deadline: float
    ) -> ChainOutcome:
        """Sends the frame of one slice, with as few calls as possible: each shows in the latency.

        A payload of up to ``SMALL_BYTES`` passes through a buffer of ours. A larger one goes straight between the link
        and the region, which the caller has pinned."""
        stream, checked = self._stream, self._checked
        frame_id = self._frame_id = self._frame_id + 1
        whole, seed = wire.FRAME_HEADER_BYTES, 0
        if opcode is Opcode.READ or nbytes > SMALL_BYTES:
            head = wire.pack_frame_of_one(
                wire.FRAME_MAGIC, opcode, checked, 1, frame_id, nbytes, key, remote_offset, nbytes
            )
            if opcode is Opcode.READ:
                stream.send_one(head, deadline)
                # The good answer is worked out while the request is on its way.
                whole += nbytes
                if checked:
                    seed = seed_of(head)
                    whole += wire.TRAILER_BYTES
                good = wire.pack_header(wire.FRAME_MAGIC, wire.READ_DONE, wire.ALL_OK, 1, frame_id, nbytes)
            else:
                # Packed before the payload moves, which pushes this code and its data out of the core's cache.
                good = wire.pack_header(wire.FRAME_MAGIC, wire.WRITE_DONE, wire.ALL_OK, 1, frame_id, 0)
                data = region.view[offset : offset + nbytes]
                send_payload(stream, head, (data,), seed_of(head) if checked else None, deadline)
        else:
            outbox = self._outbox
            if not outbox:
                outbox = self._outbox = memoryview(bytearray(INBOX_BYTES))
            wire.pack_frame_of_one_into(
                outbox, 0, wire.FRAME_MAGIC, opcode, checked, 1, frame_id, nbytes, key, remote_offset, nbytes
            )
            end = wire.FIRST_BYTES + nbytes
            data = outbox[wire.FIRST_BYTES : end]
            if not self._memory.load(region, offset, data):
                return SHUTDOWN
            if checked:
                wire.pack_trailer_into(outbox, end, checksum_of(data, seed_of(outbox[: wire.FIRST_BYTES])))
                end += wire.TRAILER_BYTES
            stream.send_one(outbox[:end], deadline)
            good = wire.pack_header(wire.FRAME_MAGIC, wire.WRITE_DONE, wire.ALL_OK, 1, frame_id, 0)
        self._asked = (opcode, region, offset, nbytes, seed, whole, good)
        return UNDER_WAY

    def wait(self, deadline: float) -> ChainOutcome:
        asked, window = self._asked, self._inbox
        assert asked is not None
        if asked[5] > INBOX_BYTES:  # a payload of this size goes straight into place
            window = window[: wire.FRAME_HEADER_BYTES]
        got = self._stream.receive_some(window, wire.FRAME_HEADER_BYTES, deadline)
        self.answered = True
        return self._end(got, deadline)

    def proceed(self) -> ChainOutcome | None:
        """Ends the slice once its whole answer is here; returns None until then. Never waits."""
        stream, inbox, got = self._stream, self._inbox, self._got
        while True:
            moved = stream.receive_now(inbox[got:])
            if moved is None:
                self._got = got
                return None
            if not moved:
                raise ConnectionResetError("the peer closed the connection")
            self.answered = True
            got += moved
            if got >= wire.FRAME_HEADER_BYTES and got >= self._wanted():
                self._got = 0
                return self._end(got, 0.0)

    def _wanted(self) -> int:
        """Returns how many bytes the answer has whose header is in the inbox."""
        asked = self._asked
        assert asked is not None
        opcode, _, _, _, _, whole, good = asked
        if self._inbox[: wire.FRAME_HEADER_BYTES] == good:
            return whole
        if self._inbox[wire.CODE_AT] != wire.SOME_REFUSED:
            return wire.FRAME_HEADER_BYTES
        trailer = wire.TRAILER_BYTES if self._checked and opcode is Opcode.READ else 0
        return wire.FRAME_HEADER_BYTES + 1 + trailer

    def _end(self, got: int, deadline: float) -> ChainOutcome:
        """Returns the outcome of the slice under way; ``got`` bytes of its answer are in the inbox."""
        asked, inbox = self._asked, self._inbox
        assert asked is not None
        opcode, region, offset, nbytes, seed, whole, good = asked
        self._asked = None
        if inbox[: wire.FRAME_HEADER_BYTES] != good:
            frame = wire.Frame(opcode, 1, self._frame_id, nbytes, self._checked)
            return self._answer(frame, seed if self._checked else None, got, deadline)
        if whole > INBOX_BYTES:
            into = (region.view[offset : offset + nbytes],)
            intact = receive_payload(self._stream, into, seed if self._checked else None, deadline, inbox[:0])
            return DONE if intact else _BAD_CHECKSUM
        if got < whole:
            self._stream.receive((inbox[got:whole],), deadline)
        elif got > whole:
            raise WireError("bytes after the reply")
        if opcode is Opcode.READ:
            end = wire.FRAME_HEADER_BYTES + nbytes
            data = inbox[wire.FRAME_HEADER_BYTES : end]
            if self._checked and checksum_of(data, seed) != wire.parse_trailer(inbox[end:whole]):
                return _BAD_CHECKSUM
            if not self._memory.store(region, offset, data):
                return SHUTDOWN
        return DONE

    def _answer(
        self, frame: wire.Frame, seed: int | None, got: int, deadline: float, chain: Chain | None = None
    ) -> ChainOutcome:
        """Returns the outcome of ``frame``; ``got`` bytes of its answer are in the inbox.

        Without ``chain``, the answer is to a frame of one slice, and says that it was not served."""
        self.answered = True
        inbox, at = self._inbox, wire.FRAME_HEADER_BYTES
        refusals = None
        code, payload = wire.parse_reply(inbox, frame)
        if code == wire.SOME_REFUSED:
            at += frame.requests
            if got < at:
                self._stream.receive([inbox[got:at]], deadline)
                got = at
            refusals = bytes(inbox[wire.FRAME_HEADER_BYTES : at])
            wire.check_refusals(refusals)
        elif code != wire.ALL_OK:
            return _BAD_CHECKSUM if code == wire.BAD_CHECKSUM else INTERNAL
        if frame.opcode == wire.READ:
            buffers = _gather(chain, refusals) if chain is not None else []
            if sum(map(len, buffers)) != payload:
                raise WireError("the reply's payload does not fit the accepted ranges")
            if not receive_payload(self._stream, buffers, seed, deadline, inbox[at:got]):
                return _BAD_CHECKSUM
        elif got > at:
            raise WireError("bytes after the reply")
        return DONE if refusals is None else ChainOutcome(TransferStatus.COMPLETED, Reason.NONE, refusals)


def _gather(chain: Chain, refusals: bytes | None) -> list[memoryview]:
    """Returns the chain's local memory in order, with neighbours joined, without the refused slices."""
    buffers: list[memoryview] = []
    key, start, end = b"", 0, 0
    view = memoryview(b"")
    for position, (_, local, offset, _, _, length) in enumerate(chain.slices):
        if refusals is not None and refusals[position]:
            continue
        if offset != end or local != key:
            if end:
                buffers.append(view[start:end])
            if local != key:
                key, view = local, chain.regions[local].view
            start = offset
        end = offset + length
    if end:
        buffers.append(view[start:end])
    return buffers


class TcpTransport(Endpoints[Connection]):
    """The initiator's side of tcp; ``service`` is the serving side."""

    def __init__(self, context: EngineContext, nics: Mapping[str, Nic], *, checked: bool = True) -> None:
        """Takes this host's ``nics`` by name; with ``checked``, payloads carry a checksum."""
        super().__init__(context, context.limits.connections_per_peer)
        self.moves_bytes = context.limits.max_frame_bytes
        self._nics = nics
        networks = Counter(nic.network for nic in nics.values() if nic.transport == "tcp")
        self._crowded = {network for network, count in networks.items() if count > 1}
        """The networks on which we have several NICs, so that the source address alone does not choose one."""
        self._checked = checked
        self.service = TcpService(context)

    def connect(self, remote: SegmentDescriptor, path: Path, deadline: float, replaces: int) -> Connection:
        there = remote.nic(path.remote_nic)
        here = self._nics.get(path.local_nic) if path.local_nic else None
        link = dial(
            self._context,
            (there.address, there.port),
            remote.boot_id,
            Service.TCP,
            deadline,
            source=here.address if here is not None else "",
            interface=here.name if here is not None and here.network in self._crowded else "",
            replaces=replaces,
        )
        return Connection(link, self._context.memory, checked=self._checked)
