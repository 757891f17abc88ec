"""The initiator's end of an RDMA connection: a queue pair that posts, and the control link that it lives with."""

from __future__ import annotations

import logging
import secrets
import select
from collections.abc import Mapping, Sequence
from typing import NoReturn

from pinyon.transfer.chains.chain import LOST, Chain, ChainOutcome
from pinyon.transfer.links.context import EngineContext
from pinyon.transfer.links.dialer import Link
from pinyon.transfer.links.endpoint import Endpoint, TryAgain
from pinyon.transfer.links.stream import DeadlineReached, Stalled
from pinyon.transfer.memory.region import Access
from pinyon.transfer.transports.control import KnownKeys, LinkWatch
from pinyon.transfer.transports.rdma import wire as rdma_wire
from pinyon.transfer.transports.rdma.hca import Hca
from pinyon.transfer.transports.rdma.hcas import HcaTable
from pinyon.transfer.transports.rdma.queue_pair import REMOTE_ACCESS_ERROR, SUCCESS, QueuePair, Work
from pinyon.transfer.transports.rdma.verbs import VerbsError
from pinyon.transfer.transports.rdma.wire import RdmaCode, RdmaOp, RegionGrant
from pinyon.transfer.types.errors import WireError
from pinyon.transfer.types.request import Opcode, Reason, TransferStatus

_log = logging.getLogger(__name__)

_POST_BYTES = 4 << 20
"""The bytes of one post. Two are outstanding, so that the NIC never waits for us; each completion shows progress."""
_WORK_BYTES = 256 << 10
"""The bytes of one work request: enough for full speed, and so few that a READ's answer beats the NIC's retry timeout.

On soft-RoCE the answer took longer, was asked for again, and speed fell to a third."""
_POLL_S = 50e-6
"""The seconds for which completions are polled before the thread sleeps: less than it takes to wake up."""
_TICK_S = 0.1
"""The seconds after which a sleeping thread checks its HCA."""
_BLIND_S = 0.001
"""The seconds between polls when the completion channel's descriptor is not known."""
_TOUCH_S = 1.0
"""Seconds of silence after which a TOUCH is sent. The peer evicts only links that were silent for longer."""


class RdmaEndpoint(Endpoint):
    """A queue pair that posts, on an HCA of this host, with the control link that it lives with.

    The peer sends nothing unasked, so a byte to read at any other time means that the link has ended."""

    def __init__(self, context: EngineContext, link: Link, hcas: HcaTable, name: str) -> None:
        """Makes the queue pair on the HCA called ``name``; ``pair`` must be called next. Raises VerbsError."""
        super().__init__(link)
        self._keys: KnownKeys[RegionGrant] = KnownKeys(context.limits.max_regions)
        self._known: Mapping[bytes, RegionGrant] = self._keys.opened
        """The grants for the present chain by key, including the peer's refusals."""
        self._limits = context.limits
        self._clock = context.clock
        self._watch = LinkWatch(link.stream)
        self._spoke = 0.0
        self._hcas = hcas
        self._largest = 0
        """The bytes that one work request may move."""
        self.hca: Hca = hcas.use(name, self, self.abort)
        try:
            self._pair = QueuePair(self.hca, self.hca.pd, posts=True)
        except BaseException:
            hcas.leave(self.hca, self)
            raise

    def pair(self, there: str, deadline: float) -> None:
        """Connects to a queue pair on the peer's HCA ``there``, and checks that bytes get there.

        Raises WireError, VerbsError, OSError, Stalled, DeadlineReached."""
        first_packet = secrets.randbits(24)
        hca = self.hca
        mine = self._pair.half(first_packet, hca.mtu, hca.reads_out)
        theirs = rdma_wire.parse_half(self._ask(RdmaOp.PAIR, rdma_wire.pack_pair(there, mine), 1, deadline))
        if theirs.mtu > hca.mtu or theirs.reads > hca.reads_out:
            raise WireError("the peer's half has more than was offered")
        self._pair.connect(theirs, first_packet, theirs.mtu, theirs.reads)
        self._largest = min(hca.max_message, theirs.max_message, _WORK_BYTES)
        sleeper = select.poll()
        sleeper.register(self.link.stream.sock.fileno(), select.POLLIN)
        if self._pair.fd >= 0:
            sleeper.register(self._pair.fd, select.POLLIN)
        self._sleeper = sleeper
        self._pair.ping()
        self._complete(deadline)

    def _ask(self, op: RdmaOp, request: bytes, count: int, deadline: float) -> bytes:
        """Asks the peer; returns the body of its answer. Raises VerbsError for a refusal, and like ``exchange``."""
        try:
            self._say(request, deadline)
            header = self.link.stream.receive_bytes(rdma_wire.HEADER_BYTES, deadline)
            self.answered = True
            head = rdma_wire.parse_reply(header, op, count)
            if head.code is not RdmaCode.OK:
                raise VerbsError(f"the peer answers {op.name} with {head.code.name}")
            return self.link.stream.receive_bytes(rdma_wire.body_bytes(head, reply=True), deadline)
        except OSError:
            self._link_ended()

    def _say(self, message: bytes, deadline: float) -> None:
        self._spoke = self._clock()
        self.link.stream.send([message], deadline)

    def _link_ended(self) -> NoReturn:
        """Raises TryAgain for an endpoint that sat idle, else ConnectionResetError.

        The peer may end a link that sat idle, and ``is_open`` is asked too early to notice every such end."""
        if self.reused:
            raise TryAgain("the control link ended") from None
        raise ConnectionResetError("the control link ended") from None

    def is_open(self) -> bool:
        return super().is_open() and self._watch.is_open()

    def prepare(self, chain: Chain) -> None:
        """Asks the peer about those keys of the chain's remote regions that are not known yet."""
        keys = {part.remote_region for part in chain.slices}
        self._known = self._keys.find(keys, lambda asked: self._resolve(asked, chain.deadline))

    def exchange(self, chain: Chain) -> ChainOutcome:
        try:
            work, refusals = _plan(chain, self._known, self.hca, self._largest)
            self._move(chain.opcode, work, chain.deadline)
        except VerbsError as error:
            _log.info("RDMA from %s: %s", self.hca.nic.name, error)
            return LOST
        except OSError:
            self._link_ended()
        return ChainOutcome(TransferStatus.COMPLETED, Reason.NONE, refusals)

    def _resolve(self, keys: Sequence[bytes], deadline: float) -> list[RegionGrant]:
        try:
            body = self._ask(RdmaOp.RESOLVE, rdma_wire.pack_resolve(keys), len(keys), deadline)
        except VerbsError as error:
            raise ConnectionError(str(error)) from None
        return rdma_wire.parse_grants(body, len(keys))

    def _move(self, opcode: Opcode, work: Sequence[Work], deadline: float) -> None:
        """Posts all work in order, and waits until it is done."""
        self._touch(deadline)
        most = self.hca.post_work
        at, outstanding = 0, 0
        while outstanding or at < len(work):
            while outstanding < 2 and at < len(work):
                start, nbytes = at, 0
                while at < len(work) and at - start < most and (nbytes == 0 or nbytes + work[at][4] <= _POST_BYTES):
                    nbytes += work[at][4]
                    at += 1
                self._pair.post(opcode, work[start:at])
                outstanding += 1
            self._complete(deadline)
            outstanding -= 1

    def _complete(self, deadline: float) -> None:
        pair = self._pair
        began = self._clock()
        polled_until = began + _POLL_S
        while (status := pair.poll()) is None and self._clock() < polled_until:
            pass
        looked = began
        while status is None:
            pair.arm()
            status = pair.poll()
            if status is not None:
                break
            now = self._clock()
            if now >= deadline:
                raise DeadlineReached
            if now - began >= self._limits.stall_s:
                raise Stalled
            self._touch(deadline)
            if now - looked >= _TICK_S:
                looked = now
                if not self.hca.usable:
                    raise VerbsError(f"{self.hca.nic.name} does not work any more")
            self._sleep(min(deadline, began + self._limits.stall_s, looked + _TICK_S) - now)
            status = pair.poll()
        if status == REMOTE_ACCESS_ERROR:
            raise TryAgain("the peer has taken back what it had granted")
        if status != SUCCESS:
            raise VerbsError(f"work ended with status {status}")

    def _touch(self, deadline: float) -> None:
        """Says that the link is in use, if it was silent for ``_TOUCH_S``."""
        if self._clock() - self._spoke >= _TOUCH_S:
            self._say(rdma_wire.pack_touch(), deadline)

    def _sleep(self, timeout_s: float) -> None:
        """Sleeps until a completion comes or the link ends, for at most ``timeout_s``."""
        pair = self._pair
        if pair.fd < 0:
            timeout_s = min(timeout_s, _BLIND_S)
        ready = self._sleeper.poll(max(1.0, timeout_s * 1000))
        for fd, _ in ready:
            if fd == pair.fd:
                pair.acknowledge()
            else:
                raise ConnectionResetError("the control link ended")

    def close(self, *, hard: bool) -> None:
        self._pair.close()
        super().close(hard=hard)
        self._hcas.leave(self.hca, self)


def _plan(chain: Chain, grants: Mapping[bytes, RegionGrant], hca: Hca, largest: int) -> tuple[list[Work], bytes | None]:
    """Returns work requests for all slices that the grants allow, and a code per slice if any is refused.

    A request has at most ``largest`` bytes, and neighbours are joined. Raises VerbsError if local memory cannot be
    registered with the NIC."""
    needed = int(Access.READ if chain.opcode is Opcode.READ else Access.WRITE)
    work: list[Work] = []
    refusals = bytearray(len(chain.slices))
    last_key, base, next_lkey = b"", 0, 0
    local = lkey = remote = rkey = length = 0
    for position, (_, near, near_offset, far, far_offset, nbytes) in enumerate(chain.slices):
        code, access, spans, keys = grants[far]
        span = spans.holding(far_offset, far_offset + nbytes)
        if code or not access & needed or span < 0:
            refusals[position] = code or (Reason.OUT_OF_RANGE if access & needed else Reason.ACCESS_DENIED)
            continue
        if near != last_key:
            next_lkey, base = hca.register(chain.regions[near])
            last_key = near
        next_rkey, address = keys[span]
        near_offset += base
        far_offset += address - spans.starts[span]
        if (
            near_offset == local + length
            and far_offset == remote + length
            and next_lkey == lkey
            and next_rkey == rkey
            and length + nbytes <= largest
        ):
            length += nbytes
            continue
        if length:
            work.append((local, lkey, remote, rkey, length))
        while nbytes > largest:
            work.append((near_offset, next_lkey, far_offset, next_rkey, largest))
            near_offset += largest
            far_offset += largest
            nbytes -= largest
        local, lkey, remote, rkey, length = near_offset, next_lkey, far_offset, next_rkey, nbytes
    if length:
        work.append((local, lkey, remote, rkey, length))
    return work, bytes(refusals) if any(refusals) else None
