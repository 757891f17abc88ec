"""RDMA: one-sided READs and WRITEs between registered regions, NIC to NIC, over reliable connections (Mooncake §3.2.3).

No processor of the peer takes part in moving bytes: it sets a queue pair up and says where regions lie, over a control
link, and the rest is between the NICs. So offsets and access are checked here, from what the peer granted, for the sake
of one behaviour with the other transports; the peer's NIC checks them again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping

from pinyon.transfer.chain import BAD_BYTES, GONE, LATE, LOST, NO_CONNECTION, SHUTDOWN, STALLED, Chain, Outcome
from pinyon.transfer.errors import WireError
from pinyon.transfer.host.discovery import discover, rdma_nics
from pinyon.transfer.host.nic import Nic, same_network
from pinyon.transfer.limits import TransferLimits
from pinyon.transfer.links.dialer import Link, dial, dial_failure
from pinyon.transfer.links.endpoint_pool import EndpointPool
from pinyon.transfer.links.handshake import Service
from pinyon.transfer.links.identity import Identity
from pinyon.transfer.links.stream import DeadlineReached, Stalled
from pinyon.transfer.memory.region import Access
from pinyon.transfer.memory.table import MemoryTable
from pinyon.transfer.path import Path
from pinyon.transfer.request import Opcode, Reason, TransferStatus
from pinyon.transfer.segment import PeerId, SegmentDescriptor
from pinyon.transfer.stats import Meter
from pinyon.transfer.transports.rdma.endpoint import AccessLost, Endpoint
from pinyon.transfer.transports.rdma.hcas import DeviceTable
from pinyon.transfer.transports.rdma.server import RdmaServer
from pinyon.transfer.transports.rdma.verbs import VerbsError, Work, rdma_available
from pinyon.transfer.transports.rdma.wire import Grant

__all__ = ["RdmaTransport", "rdma_available"]

_log = logging.getLogger(__name__)
_MAX_FRESH = 3
"""Endpoints made anew for one run: after one that the peer had closed, and when regions were unregistered."""
_MAX_ADDRESSES = 3
"""Of the peer that are tried for a control link."""
_CLOSE_S = 10.0
_WAIT_S = 0.25
"""A chain that waits for an endpoint notices within this time that it was stopped."""

_Key = tuple[PeerId, Path]


class RdmaTransport:
    """Initiator side; ``service`` is the other one."""

    name = "rdma"

    def __init__(
        self,
        memory: MemoryTable,
        limits: TransferLimits,
        identity: Identity,
        meter: Meter,
        nics: Mapping[str, Nic],
    ) -> None:
        """``nics``: this host's, by name; none: all that are active. A device is opened when it is first needed."""
        if not nics:
            nics = {nic.name: nic for nic in rdma_nics(discover())}
        self._limits = limits
        self._identity = identity
        self._meter = meter
        self._devices = DeviceTable(nics)
        self._changed = threading.Condition()
        self._pool: EndpointPool[_Key, Endpoint] = EndpointPool(limits.max_endpoints, limits.queue_pairs_per_path)
        self._keys: set[_Key] = set()
        """Of which there may be endpoints."""
        self.nics = tuple(nic for nic in nics.values() if nic.transport == "rdma")
        """What peers may connect to."""
        self.service = RdmaServer(memory, limits, self._devices)
        memory.on_unregister.append(self._devices.forget)

    # --- running chains ---

    def run(self, chain: Chain, path: Path) -> Outcome:
        """See ``Transport.run``."""
        replaces = chain.fence
        fresh = bool(replaces)
        outcome, tried = LOST, False
        for _ in range(_MAX_FRESH):
            endpoint = self._lease(chain, path, fresh, replaces)
            if isinstance(endpoint, Outcome):
                return LOST if tried and endpoint is NO_CONNECTION else endpoint
            tried = True
            chain.fence = 0  # what it named has ended before this endpoint came to be
            outcome, again = self._try(chain, endpoint)
            if not again:
                return outcome
            fresh, replaces = True, chain.fence
            with self._meter.lock:
                self._meter.retries += 1
        return outcome

    def _try(self, chain: Chain, endpoint: Endpoint) -> tuple[Outcome, bool]:
        """One attempt over this endpoint, which is released or closed; and whether a fresh one is worth another."""
        claimed = again = False
        work: list[Work] = []
        try:
            grants = endpoint.resolve({part.remote_region for part in chain.slices}, chain.deadline)
            claimed = chain.claim(endpoint.abort)
            if not claimed:
                self._release(endpoint)
                return GONE, False
            work, refusals = _plan(chain, grants, endpoint)
            endpoint.move(chain.opcode, work, chain.deadline)
            outcome = Outcome(TransferStatus.COMPLETED, Reason.NONE, refusals)
        except AccessLost:
            outcome, again = LOST, True
        except Stalled:
            outcome = STALLED
        except DeadlineReached:
            outcome = LATE
        except WireError:
            outcome = BAD_BYTES
        except VerbsError as error:
            _log.info("RDMA from %s: %s", endpoint.device.nic.name, error)
            outcome = LOST
        except OSError:  # the control link ended: as the peer may do with one that sat idle
            outcome, again = LOST, endpoint.reused
        except BaseException:  # Ctrl-C in a blocking caller's thread, or a defect
            self._discard(endpoint)
            if claimed:
                chain.unclaim()
            raise
        if outcome.status is TransferStatus.COMPLETED:
            if chain.unclaim():
                self._release(endpoint)
            else:
                self._discard(endpoint)
            return outcome, False
        # The queue pair is destroyed before anybody hears of the end: until then READs may land in local memory.
        self._discard(endpoint)
        if work and chain.opcode is Opcode.WRITE:
            chain.fence = endpoint.id
        stopped = claimed and not chain.unclaim()
        return outcome, again and not stopped and not endpoint.aborted

    def _lease(self, chain: Chain, path: Path, fresh: bool, replaces: int) -> Endpoint | Outcome:
        """An endpoint that nobody else uses, or why there is none."""
        key = (chain.remote.peer, path)
        while True:
            with self._changed:
                endpoint = None if fresh else self._pool.lease(key)
                evicted = self._reserve(chain, key) if endpoint is None else []
            if isinstance(evicted, Outcome):
                return evicted
            if endpoint is None:
                break
            if not endpoint.aborted and not endpoint.closed_by_peer:
                endpoint.reused = True
                return endpoint
            self._discard(endpoint)
        for victim in evicted:
            victim.close()
        try:
            endpoint = self._connect(chain.remote, path, chain.deadline, replaces)
        except Exception as error:
            with self._changed:
                self._pool.cancel(key)
                self._changed.notify()
            outcome = _connect_failure(error, chain.deadline)
            if outcome is None:
                raise
            return outcome
        with self._changed:
            self._pool.add(key, endpoint)
        return endpoint

    def _reserve(self, chain: Chain, key: _Key) -> list[Endpoint] | Outcome:
        """Room for one more, waited for; the idle ones that made it. With the lock held."""
        while True:
            evicted = self._pool.reserve(key)
            if evicted is not None:
                self._keys.add(key)
                return evicted
            if self._pool.closed:
                return SHUTDOWN
            if chain.done:
                return GONE
            remaining = chain.deadline - time.monotonic()
            if remaining <= 0:
                return LATE
            self._changed.wait(min(remaining, _WAIT_S))

    def _connect(self, remote: SegmentDescriptor, path: Path, deadline: float, replaces: int = 0) -> Endpoint:
        limit = min(deadline, time.monotonic() + self._limits.connect_s)
        endpoint = Endpoint(self._devices, path.local_nic, self._limits)
        try:
            endpoint.pair(self._dial(remote, path, limit, replaces), path.remote_nic, limit)
        except BaseException:
            endpoint.close()
            raise
        return endpoint

    def _dial(self, remote: SegmentDescriptor, path: Path, deadline: float, replaces: int) -> Link:
        """A control link, by any tcp address of the peer: first one beside the RDMA NIC, then the primary one."""
        there = remote.nic(path.remote_nic)
        beside = [nic for nic in remote.nics if nic.transport == "tcp" and same_network(nic, there)]
        addresses = dict.fromkeys(
            (nic.address, nic.port) for nic in [*beside, remote.nic(""), *remote.nics] if nic.transport == "tcp"
        )
        left = list(addresses)[:_MAX_ADDRESSES]
        while True:
            address = left.pop(0)
            now = time.monotonic()
            limit = now + (deadline - now) / (len(left) + 1)
            try:
                return dial(
                    address, remote.boot_id, Service.RDMA, self._identity, self._limits, limit, replaces=replaces
                )
            except (OSError, Stalled, DeadlineReached):
                if not left:
                    raise

    def _release(self, endpoint: Endpoint) -> None:
        with self._changed:
            kept = not endpoint.aborted and self._pool.release(endpoint, time.monotonic())
            if not kept:
                self._pool.discard(endpoint)
            self._changed.notify()
        if not kept:
            endpoint.close()

    def _discard(self, endpoint: Endpoint) -> None:
        endpoint.close()
        with self._changed:
            self._pool.discard(endpoint)
            self._changed.notify()

    # --- keeping house ---

    def probe(self, remote: SegmentDescriptor, path: Path, deadline: float) -> bool:
        """See ``Transport.probe``."""
        key = (remote.peer, path)
        try:
            endpoint = self._connect(remote, path, deadline)
        except Exception as error:
            if _connect_failure(error, deadline) is None:
                raise
            return False
        with self._changed:
            evicted = self._pool.reserve(key)
            if evicted is not None:
                self._keys.add(key)
                self._pool.add(key, endpoint)
        if evicted is None:
            endpoint.close()
            return True
        for victim in evicted:
            victim.close()
        self._release(endpoint)
        return True

    def forget(self, remote: SegmentDescriptor, path: Path) -> None:
        """See ``Transport.forget``."""
        self._drop([(remote.peer, path)])

    def _drop(self, keys: Iterable[_Key]) -> None:
        with self._changed:
            dropped = [endpoint for key in keys for endpoint in self._pool.drop(key)]
            self._changed.notify_all()
        for endpoint in dropped:
            endpoint.close()

    def maintain(self, now: float) -> None:
        """See ``Transport.maintain``. Devices that are being removed are let go of, else they cannot be."""
        with self._changed:
            expired = self._pool.expire(now, self._limits.idle_s)
            self._keys = {key for key in self._keys if self._pool.count(key)}
            keys = list(self._keys)
            self._changed.notify_all()
        for endpoint in expired:
            endpoint.close()
        failed = self._devices.sweep()
        if failed:
            self._drop(key for key in keys if key[1].local_nic in failed)

    @property
    def endpoints(self) -> int:
        """Open towards peers."""
        return self._pool.open

    def close(self) -> None:
        """See ``Transport.close``."""
        with self._changed:
            left = self._pool.close()
            self._changed.notify_all()
        for endpoint in left:
            endpoint.close()
        self._devices.close(_CLOSE_S)


def _plan(chain: Chain, grants: Mapping[bytes, Grant], endpoint: Endpoint) -> tuple[list[Work], bytes | None]:
    """Work requests for all slices that the grants allow, neighbours joined, and a code per slice if any is refused.

    Raises:
        VerbsError: local memory cannot be registered with the NIC.
    """
    needed = Access.READ if chain.opcode is Opcode.READ else Access.READ_WRITE
    register, largest = endpoint.device.register, endpoint.largest
    work: list[Work] = []
    refusals = bytearray(len(chain.slices))
    last_key, base, next_lkey = b"", 0, 0
    local = lkey = remote = rkey = length = 0
    for position, (_, near, near_offset, far, far_offset, nbytes) in enumerate(chain.slices):
        code, access, next_rkey, address, size = grants[far]
        if code or access < needed or far_offset + nbytes > size:
            refusals[position] = code or (Reason.ACCESS_DENIED if access < needed else Reason.OUT_OF_RANGE)
            continue
        if near != last_key:
            next_lkey, _, base = register(chain.regions[near])
            last_key = near
        near_offset += base
        far_offset += address
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


def _connect_failure(error: Exception, deadline: float) -> Outcome | None:
    """How a chain ends that got no endpoint; None for a defect."""
    if isinstance(error, VerbsError):
        _log.info("no RDMA connection: %s", error)
        return NO_CONNECTION
    return dial_failure(error, deadline)
