"""TCP: threads with blocking sockets, payload straight between sockets and registered memory.

Threads and not asyncio, because the process's event loop and its engine thread share the GIL: here a megabyte costs a
few system calls, during which the GIL is free.
"""

from __future__ import annotations

import threading
import time

from pinyon.transfer.errors import WireError
from pinyon.transfer.limits import TransferLimits
from pinyon.transfer.request import Reason, TransferStatus
from pinyon.transfer.segment import PeerId, SegmentDescriptor
from pinyon.transfer.transports.base import Chain, Meter, Outcome
from pinyon.transfer.transports.lane import Lane
from pinyon.transfer.transports.memory import MemoryTable
from pinyon.transfer.transports.tcp_client import Connection, ConnectRefused, PeerPool, PoolClosed
from pinyon.transfer.transports.tcp_server import TcpServer
from pinyon.transfer.transports.tcp_stream import DeadlineReached, Stalled

__all__ = ["TcpTransport"]

_FINAL_REFUSALS = (Reason.STALE_SEGMENT, Reason.UNAUTHENTICATED)
"""Handshake answers that the same request would get again."""


class _Peer:
    """A peer's connections and the lane of chains that wait for them."""

    def __init__(self, transport: TcpTransport, remote: SegmentDescriptor) -> None:
        limits = transport.limits
        self.pool = PeerPool(remote, transport.boot_id, transport.secret, limits)
        name = f"pinyon-transfer-out-{remote.port}"
        self.lane = Lane(name, transport.run, limits.connections_per_peer, limits.idle_s)

    @property
    def idle(self) -> bool:
        return self.pool.open_connections == 0 and self.lane.idle

    def close(self) -> list[threading.Thread]:
        """Returns the lane's threads, which end once their present chains have."""
        threads = self.lane.close()
        self.pool.close()
        return threads


class TcpTransport:
    """Initiator side; its :class:`TcpServer` is the other one."""

    name = "tcp"

    def __init__(
        self, memory: MemoryTable, limits: TransferLimits, boot_id: bytes, secret: bytes | None, meter: Meter
    ) -> None:
        self.limits = limits
        self.boot_id = boot_id
        self.secret = secret
        self._meter = meter
        self._lock = threading.Lock()
        self._peers: dict[PeerId, _Peer] = {}
        self._closed = False
        self._silence_s = min(limits.stall_s, limits.connect_s)
        self.server = TcpServer(memory, limits, boot_id, secret, meter, self._maintain)

    def submit(self, chain: Chain) -> None:
        while True:  # again when the peer is evicted between the two calls
            peer = self._peer(chain.remote)
            if isinstance(peer, Outcome):
                chain.finish(peer)
                return
            if peer.lane.submit(chain):
                return

    def run(self, chain: Chain) -> None:
        while True:
            peer = self._peer(chain.remote)
            if isinstance(peer, Outcome):
                chain.finish(peer)
                return
            try:
                outcome = self._run(chain, peer.pool)
            except PoolClosed:
                continue
            if outcome.reason is Reason.STALLED and peer.pool.silent_s >= self._silence_s:
                # Not this connection alone, the peer is frozen: what waited behind it has waited long enough. Else a
                # queue of n chains would take n stall limits to fail. What is submitted later tries again.
                peer.lane.fail_queued(outcome)
            chain.finish(outcome)
            return

    def _peer(self, remote: SegmentDescriptor) -> _Peer | Outcome:
        with self._lock:
            if self._closed:
                return Outcome(TransferStatus.CANCELLED, Reason.SHUTDOWN)
            peer = self._peers.get(remote.peer)
            if peer is None:
                if len(self._peers) >= self.limits.max_peers and not self._evict():
                    return Outcome(TransferStatus.FAILED, Reason.BUSY)
                peer = self._peers[remote.peer] = _Peer(self, remote)
            peer.pool.last_used = time.monotonic()
            return peer

    def _evict(self) -> bool:
        """Make room for a peer: the least recently used one that has nothing to do goes (part 2: SIEVE)."""
        for key, peer in sorted(self._peers.items(), key=lambda item: item[1].pool.last_used):
            if peer.lane.busy:
                continue
            peer.pool.close_idle(0.0)
            if peer.pool.open_connections == 0:
                del self._peers[key]
                peer.close()
                return True
        return False

    def _run(self, chain: Chain, pool: PeerPool) -> Outcome:
        """Up to two attempts: the second only when the connection broke before any byte of an answer.

        READ and WRITE of the same range may be repeated; the peer stops the old connection before it answers on the new
        one (``replaces``), so no late byte of the first attempt can follow the second.
        """
        replaces = 0
        while True:
            try:
                connection = pool.acquire(chain.deadline, replaces)
            except ConnectRefused as refused:
                final = refused.reason in _FINAL_REFUSALS
                return Outcome(TransferStatus.REFUSED if final else TransferStatus.FAILED, refused.reason)
            except (Stalled, DeadlineReached, TimeoutError):
                late = time.monotonic() >= chain.deadline
                return Outcome(TransferStatus.TIMEOUT, Reason.DEADLINE if late else Reason.STALLED)
            except WireError:
                return Outcome(TransferStatus.FAILED, Reason.PROTOCOL)
            except OSError:
                return Outcome(TransferStatus.FAILED, Reason.CONNECT_FAILED)
            if not chain.claim(connection.stream.abort):
                pool.release(connection)
                return Outcome(TransferStatus.CANCELLED, Reason.CANCELLED)  # it ended before, this changes nothing
            outcome = self._exchange(chain, connection)
            stopped = not chain.unclaim()
            if outcome is not None and outcome.status is TransferStatus.COMPLETED and not stopped:
                pool.release(connection)
                return outcome
            # Closing first is what lets the final status promise that nothing more lands in local memory.
            pool.discard(connection)
            if not stopped:
                pool.close_idle(0.0)  # the peer's other connections are suspect too
            if outcome is not None:
                return outcome
            if stopped or replaces or connection.answered:
                return Outcome(TransferStatus.FAILED, Reason.CONNECTION_LOST)
            replaces = connection.id
            with self._meter.lock:
                self._meter.retries += 1

    def _exchange(self, chain: Chain, connection: Connection) -> Outcome | None:
        """None: the connection broke."""
        try:
            return connection.exchange(chain)
        except Stalled:
            return Outcome(TransferStatus.TIMEOUT, Reason.STALLED)
        except DeadlineReached:
            return Outcome(TransferStatus.TIMEOUT, Reason.DEADLINE)
        except WireError:
            return Outcome(TransferStatus.FAILED, Reason.PROTOCOL)
        except OSError:
            return None

    @property
    def connections(self) -> int:
        """Open towards peers."""
        with self._lock:
            return sum(peer.pool.open_connections for peer in self._peers.values())

    def _maintain(self) -> None:
        """About once a second, in the acceptor's thread."""
        oldest_kept = time.monotonic() - self.limits.idle_s
        with self._lock:
            for key, peer in list(self._peers.items()):
                peer.pool.close_idle(self.limits.idle_s)
                if peer.idle and peer.pool.last_used < oldest_kept:
                    del self._peers[key]
                    peer.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            peers = list(self._peers.values())
            self._peers.clear()
        threads = [thread for peer in peers for thread in peer.close()]
        self.server.close()
        for thread in threads:
            thread.join(10.0)
