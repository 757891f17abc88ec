"""TCP: threads with blocking sockets, payload straight between sockets and registered memory.

Threads and not asyncio, because the process's event loop and its engine thread share the GIL: here a megabyte costs a
few system calls, during which the GIL is free.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping

from pinyon.transfer.chain import BAD_BYTES, GONE, LATE, LOST, SHUTDOWN, STALLED, Chain, Outcome
from pinyon.transfer.errors import WireError
from pinyon.transfer.host.nic import Nic
from pinyon.transfer.limits import TransferLimits
from pinyon.transfer.links.dialer import dial, dial_failure
from pinyon.transfer.links.endpoint_pool import EndpointPool
from pinyon.transfer.links.handshake import Service
from pinyon.transfer.links.identity import Identity
from pinyon.transfer.links.stream import DeadlineReached, Stalled
from pinyon.transfer.memory.table import MemoryTable
from pinyon.transfer.path import Path
from pinyon.transfer.request import Opcode, TransferStatus
from pinyon.transfer.segment import PeerId, SegmentDescriptor
from pinyon.transfer.stats import Meter
from pinyon.transfer.transports.tcp.checksum import ChecksumPolicy
from pinyon.transfer.transports.tcp.client import Connection
from pinyon.transfer.transports.tcp.server import TcpService

__all__ = ["TcpTransport"]

_Key = tuple[PeerId, Path]


class TcpTransport:
    """Initiator side; ``service`` is the other one."""

    name = "tcp"

    def __init__(
        self,
        memory: MemoryTable,
        limits: TransferLimits,
        identity: Identity,
        meter: Meter,
        nics: Mapping[str, Nic],
        *,
        checksum: str = "auto",
    ) -> None:
        """
        Args:
            nics: this host's, by name.
            checksum: "on", "off", or "auto" for those frames that it makes slower by less than 5 %.

        Raises:
            InvalidTransfer: no such checksum mode.
        """
        self._limits = limits
        self._identity = identity
        self._meter = meter
        self._nics = nics
        networks = Counter(nic.network for nic in nics.values() if nic.transport == "tcp")
        self._crowded = {network for network, count in networks.items() if count > 1}
        """Networks on which we have several NICs: there the source address alone does not choose one."""
        ChecksumPolicy(checksum)
        self._checksum = checksum
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._waiting = 0
        """Threads that wait for a connection."""
        self._parked: dict[_Key, Connection] = {}
        """Per path the connection that was used last, so that one chain after another needs neither the lock nor the
        pool, for which it stays in use. Taken by ``pop``, put by ``setdefault``: both atomic. Whoever wants the pool's
        books to be right calls ``_unpark``."""
        self._epoch = 0
        """Grows whenever connections that are in use now must go through the pool when they are released."""
        self._pool: EndpointPool[_Key, Connection] = EndpointPool(limits.max_endpoints, limits.connections_per_peer)
        self.service = TcpService(memory, limits, meter)

    # --- running chains ---

    def run(self, chain: Chain, path: Path) -> Outcome:
        """See ``Transport.run``."""
        key = (chain.remote.peer, path)
        replaces = chain.fence
        replaced_silently = False
        while True:
            epoch = self._epoch
            connection = None if replaces else self._parked.pop(key, None)
            if connection is None:
                leased = self._lease(chain, key, replaces)
                if isinstance(leased, Outcome):
                    return leased
                connection = leased
            if not chain.claim(connection.abort):
                self._release(connection)
                return GONE
            chain.fence = 0  # what it named has ended before this link came to be
            try:
                outcome = connection.exchange(chain)
            except Stalled:
                outcome = STALLED
            except DeadlineReached:
                outcome = LATE
            except WireError:
                outcome = BAD_BYTES
            except OSError:
                outcome = LOST
            except BaseException:  # Ctrl-C in a blocking caller's thread, or a defect
                self._discard(connection)
                chain.unclaim()
                raise
            stopped = not chain.unclaim()
            if outcome.status is TransferStatus.COMPLETED and not stopped:
                if self._parked.setdefault(key, connection) is not connection:
                    self._release(connection)
                elif (self._waiting or self._epoch != epoch) and self._parked.pop(key, None) is not None:
                    # Looked at after parking: whoever changed these has either seen what is parked or is seen here.
                    self._release(connection)
                return outcome
            # Closed before anybody hears of the end; reset, so that nothing trickles on out of our send buffer.
            self._discard(connection)
            if chain.opcode is Opcode.WRITE:
                chain.fence = connection.id
            if outcome is not LOST or stopped or replaced_silently or not connection.closed_by_peer:
                return outcome
            replaced_silently = True
            replaces = connection.id
            with self._meter.lock:
                self._meter.retries += 1

    def _lease(self, chain: Chain, key: _Key, replaces: int) -> Connection | Outcome:
        """A connection that nobody else uses, or why there is none."""
        pool = self._pool
        with self._lock:
            while True:
                if not replaces:
                    connection = pool.lease(key)
                    if connection is not None:
                        return connection
                evicted = pool.reserve(key)
                if evicted is not None:
                    break
                if pool.closed:
                    return SHUTDOWN
                if chain.done:
                    return GONE
                self._waiting += 1
                try:
                    if self._unpark():
                        continue
                    remaining = chain.deadline - time.monotonic()
                    if remaining <= 0:
                        return LATE
                    self._changed.wait(remaining)
                finally:
                    self._waiting -= 1
        for victim in evicted:
            victim.close(hard=False)
        try:
            connection = self._connect(chain.remote, key[1], chain.deadline, replaces)
        except BaseException as error:
            with self._lock:
                pool.cancel(key)
                self._changed.notify_all()
            outcome = dial_failure(error, chain.deadline)
            if outcome is None:
                raise
            return outcome
        with self._lock:
            pool.add(key, connection)
        return connection

    def _connect(self, remote: SegmentDescriptor, path: Path, deadline: float, replaces: int = 0) -> Connection:
        there = remote.nic(path.remote_nic)
        here = self._nics.get(path.local_nic) if path.local_nic else None
        link = dial(
            (there.address, there.port),
            remote.boot_id,
            Service.TCP,
            self._identity,
            self._limits,
            deadline,
            source=here.address if here is not None else "",
            device=here.name if here is not None and here.network in self._crowded else "",
            replaces=replaces,
        )
        return Connection(link, ChecksumPolicy(self._checksum))

    def _release(self, connection: Connection) -> None:
        connection.used = True  # from now on it sits idle: the peer may close it
        with self._lock:
            kept = self._pool.release(connection, time.monotonic())
            if self._waiting:
                self._changed.notify_all()  # each may wait for another path
        if not kept:
            connection.close(hard=False)

    def _unpark(self) -> bool:
        """Lock held. Parked connections become idle ones of the pool. True: there were some."""
        now = time.monotonic()
        some = False
        for key in list(self._parked):
            connection = self._parked.pop(key, None)
            if connection is not None:
                some = True
                if not self._pool.release(connection, now):
                    connection.close(hard=False)
        return some

    def _discard(self, connection: Connection) -> None:
        with self._lock:
            ours = self._pool.discard(connection)
            self._changed.notify_all()
        if ours:
            connection.close(hard=True)

    # --- keeping house ---

    def probe(self, remote: SegmentDescriptor, path: Path, deadline: float) -> bool:
        """See ``Transport.probe``."""
        key = (remote.peer, path)
        try:
            connection = self._connect(remote, path, deadline)
        except Exception as error:
            if dial_failure(error, deadline) is None:
                raise
            return False
        with self._lock:
            evicted = self._pool.reserve(key)
            if evicted is not None:
                self._pool.add(key, connection)
        if evicted is None:
            connection.close(hard=False)
            return True
        for victim in evicted:
            victim.close(hard=False)
        self._release(connection)
        return True

    def forget(self, remote: SegmentDescriptor, path: Path) -> None:
        """See ``Transport.forget``."""
        with self._lock:
            self._epoch += 1
            self._unpark()
            dropped = self._pool.drop((remote.peer, path))
            self._changed.notify_all()
        for connection in dropped:
            connection.close(hard=False)

    def maintain(self, now: float) -> None:
        """See ``Transport.maintain``."""
        with self._lock:
            self._epoch += 1
            self._unpark()
            expired = self._pool.expire(now, self._limits.idle_s)
            self._changed.notify_all()
        for connection in expired:
            connection.close(hard=False)

    @property
    def endpoints(self) -> int:
        """Open towards peers."""
        return self._pool.open

    def close(self) -> None:
        """See ``Transport.close``."""
        with self._lock:
            self._epoch += 1
            self._unpark()
            left = self._pool.close()
            self._changed.notify_all()
        for connection in left:
            connection.close(hard=False)
