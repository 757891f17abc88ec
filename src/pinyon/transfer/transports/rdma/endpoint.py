"""The initiator's end of one RDMA connection: a queue pair that posts, and the control link that it lives with."""

from __future__ import annotations

import secrets
import select
import time
from collections.abc import Collection, Sequence

from pinyon.transfer.errors import WireError
from pinyon.transfer.limits import TransferLimits
from pinyon.transfer.links.dialer import Link
from pinyon.transfer.links.stream import DeadlineReached, Stalled
from pinyon.transfer.request import Opcode
from pinyon.transfer.transports.rdma import wire as rdma_wire
from pinyon.transfer.transports.rdma.hcas import DeviceTable
from pinyon.transfer.transports.rdma.verbs import REMOTE_ACCESS_ERROR, SUCCESS, Device, QueuePair, VerbsError, Work
from pinyon.transfer.transports.rdma.wire import Code, Grant, Op

__all__ = ["AccessLost", "Endpoint"]

TOUCH_S = 1.0
"""The peer hears at least this often that the queue pair is in use: it evicts only what was silent for longer."""
_POST_BYTES = 4 << 20
"""Bytes per post. Two are outstanding, so the NIC never waits for us, and each completion is a sign of progress."""
_WORK_BYTES = 256 << 10
"""Bytes per work request. Enough for full speed, and so few that the answer to a READ takes less than the NIC's retry
timeout (on soft-RoCE it took longer, was asked for again, and speed fell to a third)."""
_POLL_S = 50e-6
"""Completions are polled for so long before the thread sleeps: less than it takes to wake up."""
_TICK_S = 0.1
"""A sleeping thread looks after its device this often."""
_BLIND_S = 0.001
"""Between polls when the completion channel's descriptor is not known."""


class AccessLost(Exception):
    """The peer's NIC refused a range that the peer had granted: the region was unregistered meanwhile."""


class Endpoint:
    """One thread uses it at a time; only ``abort`` may be called from others. Any exception leaves it unusable."""

    def __init__(self, devices: DeviceTable, nic: str, limits: TransferLimits) -> None:
        """A queue pair on this host's NIC; ``pair`` comes next.

        Raises:
            VerbsError
        """
        self._devices = devices
        self._limits = limits
        self._link: Link | None = None
        self._grants: dict[bytes, Grant] = {}
        self._spoke = 0.0
        self._largest = 0
        self._aborted = False
        self.reused = False
        """It has carried a chain before this one."""
        self.device: Device = devices.use(nic, self, self.abort)
        try:
            self._pair = QueuePair(self.device, posts=True)
        except BaseException:
            devices.leave(self.device, self)
            raise

    def pair(self, link: Link, there: str, deadline: float) -> None:
        """Take over the link, connect with a queue pair on the peer's NIC ``there``, and see that bytes get there.

        Raises:
            WireError, VerbsError, OSError, Stalled, DeadlineReached
        """
        self._link = link
        if self._aborted:
            raise ConnectionAbortedError("stopped")
        first_packet = secrets.randbits(24)
        device = self.device
        mine = self._pair.half(first_packet, device.mtu, device.reads_out)
        theirs = rdma_wire.parse_half(self._ask(Op.PAIR, rdma_wire.pack_pair(there, mine), 1, deadline))
        if theirs.mtu > device.mtu or theirs.reads > device.reads_out:
            raise WireError("the peer's half has more than was offered")
        self._pair.connect(theirs, first_packet, theirs.mtu, theirs.reads)
        self._largest = min(device.max_message, theirs.max_message, _WORK_BYTES)
        sleeper = select.poll()
        sleeper.register(link.stream.sock.fileno(), select.POLLIN)
        if self._pair.fd >= 0:
            sleeper.register(self._pair.fd, select.POLLIN)
        self._sleeper = sleeper
        self._pair.ping()
        self._complete(deadline)

    def _ask(self, op: Op, request: bytes, count: int, deadline: float) -> bytes:
        assert self._link is not None
        stream = self._link.stream
        self._spoke = time.monotonic()
        stream.send([request], deadline)
        head = rdma_wire.parse_reply(self._link.receive_bytes(rdma_wire.HEADER_BYTES, deadline), op, count)
        if head.code is not Code.OK:
            raise VerbsError(f"the peer answers {op.name} with {head.code.name}")
        return self._link.receive_bytes(rdma_wire.body_bytes(head, reply=True), deadline)

    @property
    def id(self) -> int:
        """Of the control link; what a later one replaces."""
        return 0 if self._link is None else self._link.id

    @property
    def aborted(self) -> bool:
        return self._aborted

    @property
    def closed_by_peer(self) -> bool:
        """Nothing comes on the link unasked, so whatever there is to read is its end."""
        return any(fd != self._pair.fd for fd, _ in self._sleeper.poll(0))

    @property
    def largest(self) -> int:
        """Bytes that one work request may move."""
        return self._largest

    def resolve(self, keys: Collection[bytes], deadline: float) -> dict[bytes, Grant]:
        """What the peer grants for these region keys; asked once per key and endpoint.

        Raises:
            WireError, VerbsError, OSError, Stalled, DeadlineReached
        """
        grants = self._grants
        unknown = [key for key in keys if key not in grants]
        refused: dict[bytes, Grant] = {}
        for start in range(0, len(unknown), rdma_wire.MAX_KEYS):
            asked = unknown[start : start + rdma_wire.MAX_KEYS]
            body = self._ask(Op.RESOLVE, rdma_wire.pack_resolve(asked), len(asked), deadline)
            for key, grant in zip(asked, rdma_wire.parse_grants(body), strict=True):
                # only what is granted is remembered: a region may be registered or opened later
                (grants if grant.access else refused)[key] = grant
        return grants | refused if refused else grants

    def move(self, opcode: Opcode, work: Sequence[Work], deadline: float) -> None:
        """Post it all, in order, and wait until all of it is done.

        Raises:
            AccessLost, VerbsError, OSError (the link ended), Stalled, DeadlineReached
        """
        self._touch(time.monotonic(), deadline)
        most = self.device.post_work
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

    def _touch(self, now: float, deadline: float) -> None:
        if now - self._spoke >= TOUCH_S:
            assert self._link is not None
            self._spoke = now
            self._link.stream.send([rdma_wire.pack_touch()], deadline)

    def _complete(self, deadline: float) -> None:
        """Wait for one completion."""
        pair = self._pair
        began = time.monotonic()
        polled_until = began + _POLL_S
        while (status := pair.poll()) is None and time.monotonic() < polled_until:
            pass
        looked = began
        while status is None:
            pair.arm()
            status = pair.poll()
            if status is not None:
                break
            now = time.monotonic()
            if now >= deadline:
                raise DeadlineReached
            if now - began >= self._limits.stall_s:
                raise Stalled
            self._touch(now, deadline)
            if now - looked >= _TICK_S:
                looked = now
                if not self.device.usable:
                    raise VerbsError(f"{self.device.nic.name} does not work any more")
            self._sleep(min(deadline, began + self._limits.stall_s, looked + _TICK_S) - now)
            status = pair.poll()
        if status == REMOTE_ACCESS_ERROR:
            raise AccessLost
        if status != SUCCESS:
            raise VerbsError(f"work ended with status {status}")

    def _sleep(self, timeout_s: float) -> None:
        """Until a completion comes, the link ends, or at most so long."""
        pair = self._pair
        if pair.fd < 0:
            timeout_s = min(timeout_s, _BLIND_S)
        ready = self._sleeper.poll(max(1.0, timeout_s * 1000))
        for fd, _ in ready:
            if fd == pair.fd:
                pair.acknowledge()
            else:
                raise ConnectionResetError("the control link ended")

    def abort(self) -> None:
        """Make whoever uses it stop soon."""
        self._aborted = True
        if self._link is not None:
            self._link.stream.abort()

    def close(self) -> None:
        """On return nothing of it touches local memory any more. Its user calls it, or the pool's owner when idle."""
        self._pair.close()
        if self._link is not None:
            self._link.stream.close(hard=True)
        self._devices.leave(self.device, self)
