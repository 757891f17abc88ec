"""The transfer engine as its callers see it (Mooncake §3.2.2): register memory, open some of it to peers, move bytes.

:mod:`.submissions` carries the requests out. All methods may be called from any thread unless said otherwise."""

from __future__ import annotations

import asyncio
import random
import secrets
import threading
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from pinyon.core.clock import Clock
from pinyon.transfer.awaited import AwaitedTransfers
from pinyon.transfer.handle import TransferGroup, TransferHandle
from pinyon.transfer.host.process import available_cores, host_id
from pinyon.transfer.links.acceptor import Acceptor
from pinyon.transfer.links.context import EngineContext
from pinyon.transfer.memory.grant import Grant
from pinyon.transfer.memory.region import Access, Region
from pinyon.transfer.memory.table import MemoryTable
from pinyon.transfer.paths.board import PathState
from pinyon.transfer.paths.peers import Peers
from pinyon.transfer.paths.reach import Reach
from pinyon.transfer.registry import build_transports
from pinyon.transfer.small import SmallTransfers
from pinyon.transfer.submissions import Submissions
from pinyon.transfer.types.errors import EngineClosed, InvalidTransfer
from pinyon.transfer.types.limits import TransferLimits
from pinyon.transfer.types.nic import Nic
from pinyon.transfer.types.options import Network, Transports
from pinyon.transfer.types.request import TransferRequest, TransferResult
from pinyon.transfer.types.segment import BOOT_ID_BYTES, PeerId, SegmentDescriptor
from pinyon.transfer.types.stats import TransferStats

if TYPE_CHECKING:
    from pinyon.transfer.links.tls import TlsContexts

_WILDCARDS = ("", "0.0.0.0", "::")


class TransferEngine:
    """An engine that moves bytes between registered memory here and registered memory of peers, one-sided.

    A process has one. Call ``start`` before use, and ``close`` (or leave the ``with`` block) to end all threads and
    connections."""

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        secret: bytes | None = None,
        tls: TlsContexts | None = None,
        network: Network | None = None,
        transports: Transports | Sequence[str] | None = None,
        limits: TransferLimits | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """Creates an engine that will listen on ``host`` and ``port``; port 0 picks a free one.

        If ``secret``, the cluster's, is given, both sides of every link must prove that they know it. With ``tls``, tcp
        links use mutually authenticated TLS. Either the whole cluster does so or no process; the owner of ``tls``
        renews it. In ``network`` are NICs besides ``host``, their topology, and what peers connect to. For
        ``transports`` the names alone, best first, are enough. Deadlines, pauses and measured rates go by ``clock``,
        in monotonic seconds.

        Raises InvalidTransfer for a value that makes no sense, or a named transport that does not work here."""
        network = network or Network()
        if not isinstance(transports, Transports):
            transports = Transports(transports)
        if network.advertise_host is None and host in _WILDCARDS:
            raise InvalidTransfer("listening on a wildcard address needs advertise_host", field="advertise_host")
        if secret is not None and not secret:
            raise InvalidTransfer("the cluster secret is empty", field="secret")
        most = self.limits = limits or TransferLimits()
        self.boot_id = secrets.token_bytes(BOOT_ID_BYTES)
        self._memory = MemoryTable(most, clock)
        context = EngineContext(self.boot_id, self._memory, most, secret, tls, clock=clock)
        self._context = context
        self._host, self._port = host, port
        self._network = network
        built = self._built = build_transports(context, transports, network.nics)
        self._nics = built.nics
        self._host_id = host_id()
        self._acceptor = Acceptor(context, built.services)
        ours = network.topology, self.boot_id, self._host_id, most, available_cores()
        reach = Reach(built.order, built.nics, *ours)
        self._peers = Peers(context, reach, built.transports, self._tend, random.Random())
        self._submissions = Submissions(context, self._peers, reach.streams)
        self._small = SmallTransfers(context, self._submissions, self._peers)
        self._awaited = AwaitedTransfers(context, self._small, self._submissions, self._peers)
        self._lock = threading.Lock()
        self._state = "new"

    # --- life ---

    def start(self) -> None:
        """Binds and serves. Raises EngineClosed if it was started before, OSError if the address cannot be had."""
        with self._lock:
            if self._state != "new":
                raise EngineClosed("an engine starts once")
            try:
                self._listen()
                self._peers.start()
            except BaseException:
                self._state = "closed"
                self._submissions.close()
                self._peers.close()
                self._acceptor.close()
                raise
            self._state = "running"
            self._submissions.running = True

    def _tend(self, now: float) -> None:
        """Expires grants and ends orphaned transfers, about once a second, in the thread that looks after the peers."""
        self._memory.expire(now)
        self._awaited.end_orphans(now)

    def _listen(self) -> None:
        self._port = self._acceptor.listen(self._host, self._port)
        bound: list[Nic] = []
        for nic in self._nics:
            if nic.transport == "tcp":
                same = nic.address == self._host and nic.port in (0, self._port)
                nic = nic._replace(port=self._port if same else self._acceptor.listen(nic.address, nic.port))
            bound.append(nic)
        self._nics = tuple(bound)
        if self._built.shm:
            self._acceptor.listen_unix(self._built.shm)

    def close(self) -> None:
        """Ends everything: requests in flight end as CANCELLED, connections are closed, threads joined. Idempotent.

        Registered memory is released: nothing of this engine touches it afterwards. Not from a done callback."""
        with self._lock:
            was, self._state = self._state, "closed"
        if was == "closed":
            return
        live = self._submissions.close()
        self._peers.close()
        self._acceptor.close()
        for handle in live:
            handle.wait(self.limits.stall_s)
        for region in self._memory.regions():
            self._memory.unregister(region, self.limits.stall_s)

    def __enter__(self) -> TransferEngine:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- memory ---

    def register_local_memory(
        self, buffer: object, location: str | None = None, *, access: Access = Access.READ_WRITE
    ) -> Region:
        """Registers memory for use as a local range, and opens all of it to peers as far as ``access`` says.

        With ``Access.NONE`` peers reach only what :meth:`grant` opens. Services use that: each of their peers has its
        own business with a part of the memory.

        ``buffer`` is writable and C-contiguous: an object with the buffer protocol, or a tensor by DLPack (so of
        PyTorch, JAX, CuPy, ...), on the CPU or on a device. The region keeps the memory alive and, for a ``bytearray``,
        its size fixed until ``unregister``. Its place in the topology is ``location``; None means ``"cpu:0"``, or the
        device (``"cuda:1"``). A location ``"cpu:..."`` is always host memory.

        Memory of a GPU goes straight by RDMA where its driver and the NIC share it (dmabuf), else through pinned host
        memory. As with any RDMA, nothing waits for what the GPU still computes: synchronise before you submit.

        Raises InvalidTransfer for another buffer, a device that cannot be used here, or a bad location;
        TransferLimitReached for too many regions."""
        return self._memory.register(buffer, location, access)

    def unregister(self, region: Region) -> None:
        """Forgets a region; on return nothing of this engine reads or writes its memory. Idempotent.

        Operations in flight get the stall limit to finish, then they are aborted. Blocks meanwhile."""
        self._memory.unregister(region, self.limits.stall_s)

    def grant(
        self, region: Region, ranges: Iterable[tuple[int, int]], access: Access, *, lifetime_s: float | None = None
    ) -> Grant:
        """Opens ranges of a region to whoever holds the grant's key, until it is revoked. Takes microseconds.

        The ``ranges`` are ``(offset, length)`` in bytes, in any order; peers name offsets in the region, too. The
        right to write opens nothing that is there before. After ``lifetime_s`` seconds the key is refused all the same;
        None means never. What peers reach without this process (by RDMA or shm) is shut within a second after that;
        frames on their way may go on.

        Raises InvalidTransfer for a range outside the region, none at all, no right, no time, or an unknown region;
        also TransferLimitReached and EngineClosed."""
        if self._state == "closed":  # the regions are gone, which is no mistake of the caller's
            raise EngineClosed("the engine is closed")
        return self._memory.grant(region, ranges, access, lifetime_s)

    def extend(self, grant: Grant, lifetime_s: float) -> bool:
        """Lets a grant's key open its ranges for ``lifetime_s`` seconds from now. Returns False if it is over."""
        return self._memory.extend(grant, lifetime_s)

    def view(self, key: bytes) -> memoryview | None:
        """Returns the bytes of a region of host memory by its key; None for another region, or an unregistered one."""
        region = self._memory.get(key)
        return None if region is None or region.device is not None else getattr(region, "view", None)

    def revoke_now(self, grant: Grant) -> bool:
        """Refuses the grant's key from now on, without blocking; returns whether no peer uses it any more.

        After False a peer perhaps does: call :meth:`revoke` before the memory serves something else."""
        return self._memory.revoke_now(grant)

    def revoke(self, grant: Grant, grace_s: float | None = None) -> None:
        """Takes a grant back; on return no peer reads or writes anything by its key any more. Idempotent.

        Frames in flight get ``grace_s`` (by default the stall limit) to finish, then their links are cut. Blocks
        meanwhile. Raises TransferError if an operation could not be stopped (a defect): the memory must not be reused.
        """
        self._memory.revoke(grant, self.limits.stall_s if grace_s is None else grace_s)

    async def revoke_async(self, grant: Grant) -> None:
        """Revokes like :meth:`revoke`, for asyncio; in a thread only where it must wait."""
        if not self.revoke_now(grant):
            await asyncio.to_thread(self.revoke, grant)

    def descriptor(self, regions: Iterable[Region | Grant] | None = None) -> SegmentDescriptor:
        """Returns what peers need to reach these regions or granted ranges over every NIC of this process.

        The default is all regions whose own keys open something. The descriptor holds the regions' keys, so it is for
        authenticated channels only. Raises EngineClosed if the engine is not running."""
        if self._state != "running":
            raise EngineClosed("the engine is not running")
        if regions is None:
            regions = [one for one in self._memory.regions() if one.access is not Access.NONE]
        published = tuple(one.descriptor() for one in regions)
        return SegmentDescriptor(
            self._network.advertise_host or self._host,
            self._port,
            self.boot_id,
            published,
            self._nics,
            self._network.topology,
            self._built.shm,
            self._host_id,
        )

    # --- moving bytes ---

    def submit(self, requests: Sequence[TransferRequest], timeout_s: float | None = None) -> TransferHandle:
        """Starts requests and returns at once; the handle can be waited for, awaited, polled or called back.

        Raises InvalidTransfer, TransferLimitReached or EngineClosed."""
        return self._submissions.submit(requests, timeout_s)

    def group(self) -> TransferGroup:
        """Returns an empty group of submissions that are awaited together."""
        return TransferGroup(self.submit, self._context.clock)

    def transfer(self, requests: Sequence[TransferRequest], timeout_s: float | None = None) -> list[TransferResult]:
        """Moves bytes and waits; returns one final result per request (see ``raise_for_failure``).

        An event loop's thread must not call it. Raises InvalidTransfer, TransferLimitReached or EngineClosed."""
        return self._small.transfer(requests, timeout_s)

    async def transfer_async(
        self, requests: Sequence[TransferRequest], timeout_s: float | None = None, *, checksum: bool = True
    ) -> list[TransferResult]:
        """Transfers like :meth:`transfer`, for asyncio; cancelling the task stops the transfer first.

        Callers that check the bytes themselves need no ``checksum``: tcp payloads go without one, except small ones."""
        return await self._awaited.transfer(requests, timeout_s, checksum=checksum)

    def stats(self) -> TransferStats:
        """Returns a snapshot of the counters."""
        requests, outbound, inbound = self._submissions.in_flight(), self._peers.endpoints, self._acceptor.links
        meter = self._context.meter
        with meter.lock:
            return meter.snapshot(requests=requests, outbound=outbound, inbound=inbound, grants=self._memory.grants)

    def paths(self) -> list[tuple[PeerId, PathState]]:
        """Returns the state of every path to every peer: usable or avoided, measured rate, bytes in flight."""
        return self._peers.path_states()
