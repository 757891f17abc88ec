"""The thin edge over pyverbs: an opened port of an RDMA device, its memory registrations and its queue pairs.

The only file that imports pyverbs, and only when something here is called. What to know about pyverbs (44 to 59): it
keeps the GIL in every call, so nothing here may block; it shows no file descriptors; its ``SGE`` and ``SendWR`` never
free what they allocate, so they are made once and filled again (24 times cheaper, too).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from ipaddress import IPv6Address
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from pinyon.transfer.host.inventory import Gid, choose_gid
from pinyon.transfer.host.nic import Nic
from pinyon.transfer.memory.device import DeviceError
from pinyon.transfer.memory.region import Access, Region
from pinyon.transfer.request import Opcode
from pinyon.transfer.transports.rdma.wire import MAX_MESSAGE_BYTES, MAX_READS, Half

__all__ = ["Device", "QueuePair", "Registration", "VerbsError", "Work", "rdma_available"]

_log = logging.getLogger(__name__)

POST_WORK = 128
"""Work requests per post, if the device has room for two posts."""
SUCCESS = 0
REMOTE_ACCESS_ERROR = 10
"""``IBV_WC_REM_ACCESS_ERR``: the peer's NIC does not know the rkey (any more), or not for this range or direction."""

_GIDS = 1024
_HOPS = 64
_MIN_RNR_TIMER = 12
"""0.64 ms; must be set, but one-sided work needs no receives and never waits for one."""
_ACK_TIMEOUT = 14
"""4.096 µs x 2^14 = 67 ms until a packet is sent again; NICs may take up to four times that."""
_RETRIES = 6
"""With the timeout above a dead path is found after 0.5 to 2 s. Not 7, the largest: soft-RoCE takes that for ever."""
_WANTED_READS = 16
"""READs that a queue pair has outstanding at most: what common NICs offer."""
_PORT_ACTIVE = 4
_UVERBS = Path("/sys/class/infiniband_verbs")
_DEV = Path("/dev/infiniband")
_GID_KINDS = {0: "IB/RoCE v1", 1: "IB/RoCE v1", 2: "RoCE v2"}


class VerbsError(Exception):
    """A verb failed, or there is nothing to call it on."""


class Registration(NamedTuple):
    """A region as one device knows it."""

    lkey: int
    rkey: int
    base: int
    """Address of the region's first byte, for work requests."""


Work = tuple[int, int, int, int, int]
"""One work request: local address, lkey, remote address, rkey, bytes."""


@functools.cache
def _pyverbs() -> SimpleNamespace:
    """The names we use.

    Raises:
        VerbsError: pyverbs cannot be imported.
    """
    wanted = {
        "addr": ("AHAttr", "GID", "GlobalRoute"),
        "cq": ("CQ", "CompChannel"),
        "device": ("Context", "get_device_list"),
        "fork": ("fork_init",),
        "mr": ("MR", "DmaBufMR"),
        "pd": ("PD",),
        "pyverbs_error": ("PyverbsError",),
        "qp": ("QP", "QPAttr", "QPCap", "QPInitAttr"),
        "wr": ("SGE", "SendWR"),
    }
    names = SimpleNamespace()
    try:
        names.e = importlib.import_module("pyverbs.enums")
        for module, members in wanted.items():
            loaded = importlib.import_module(f"pyverbs.{module}")
            for member in members:
                setattr(names, member, getattr(loaded, member))
    except (ImportError, AttributeError) as error:
        raise VerbsError(
            f"pyverbs cannot be used ({error}): pip install 'pinyon[rdma]', or the distribution's python3-pyverbs"
        ) from None
    with contextlib.suppress(names.PyverbsError):
        names.fork_init()  # registered pages stay ours when the process forks; nothing to do on kernels from 5.12
    return names


@contextlib.contextmanager
def _verb(what: str) -> Iterator[None]:
    try:
        yield
    except (_pyverbs().PyverbsError, OSError, DeviceError) as error:
        raise VerbsError(f"{what}: {str(error).strip()}") from None


def rdma_available() -> str | None:
    """Why RDMA cannot be used here, in words for people; None when it can."""
    try:
        names = _pyverbs()
        with _verb("RDMA devices cannot be listed"):
            devices = [device.name.decode() for device in names.get_device_list()]
    except VerbsError as error:
        return str(error)
    entries = [entry for name in devices if (entry := _character_device(name)) is not None]
    if not entries:
        return "this host has no RDMA device that libibverbs knows"
    if not any(os.access(_DEV / entry.name, os.R_OK | os.W_OK) for entry in entries):
        return f"no permission to open {', '.join(str(_DEV / entry.name) for entry in entries)}"
    return None


def _event_fds() -> set[int]:
    """Our descriptors on which the kernel reports completions. pyverbs does not say which belongs to a channel."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}") == "anon_inode:[infinibandevent]":
                found.add(int(name))
    return found


_channels = threading.Lock()


def _open_channel(names: SimpleNamespace, context: Any) -> tuple[Any, int]:
    """A completion channel and its descriptor, -1 if it cannot be told which one that is."""
    with _channels:
        before = _event_fds()
        channel = names.CompChannel(context)
        new = _event_fds() - before
    if len(new) != 1:
        return channel, -1
    fd = new.pop()
    os.set_blocking(fd, False)  # pyverbs would wait with the GIL held
    return channel, fd


class Device:
    """One opened port of an RDMA device with a protection domain. Thread-safe; owned by ``DeviceTable``."""

    def __init__(self, nic: Nic) -> None:
        """
        Raises:
            VerbsError: no such device, its port is not active, or it has no usable GID.
        """
        names = _pyverbs()
        self.nic = nic
        self._lock = threading.Lock()
        self._registered: dict[Region, tuple[Any, Registration]] = {}
        self._answering: Any = None
        with _verb(f"{nic.name} cannot be opened"):
            self.context = names.Context(name=nic.name)
        try:
            self._character_device = _character_device(nic.name)
            with _verb(f"{nic.name} does not work"):
                limits = self.context.query_device()
                port = self.context.query_port(nic.port)
                self.pd = names.PD(self.context)
                table = self.context.query_gid_table(_GIDS)
            if port.state != _PORT_ACTIVE:
                raise VerbsError(f"port {nic.port} of {nic.name} is not active")
            self.gid_index, self.gid = _find_gid(table, nic)
            self.lid = port.lid
            self.mtu = port.active_mtu
            self.max_message = min(port.max_msg_sz, MAX_MESSAGE_BYTES)
            self.post_work = max(1, min(POST_WORK, limits.max_qp_wr // 2, limits.max_cqe // 2 - 1))
            self.reads_out = max(1, min(limits.max_qp_init_rd_atom, _WANTED_READS))
            self.reads_in = max(1, min(limits.max_qp_rd_atom, MAX_READS))
        except BaseException:
            self.close()
            raise

    @property
    def usable(self) -> bool:
        """Its port is active and nobody wants to remove it."""
        try:
            with _verb(self.nic.name):
                return self.present and self.context.query_port(self.nic.port).state == _PORT_ACTIVE
        except VerbsError:
            return False

    @property
    def present(self) -> bool:
        """False: it is being removed, which waits until we have closed it (or it is gone already)."""
        return self._character_device is None or self._character_device.exists()

    def register(self, region: Region) -> Registration:
        """The region's registration, made at first use; it ends with :meth:`forget`.

        Raises:
            VerbsError: the region was unregistered meanwhile, or the NIC has no room.
        """
        known = self._registered.get(region)
        if known is not None:
            return known[1]
        with self._lock:
            if not region.alive:
                raise VerbsError("the region is not registered any more")
            if region not in self._registered:
                with _verb(f"{region.length} bytes cannot be registered with {self.nic.name} (see ulimit -l)"):
                    handle, base = _register(self.pd, region)
                    self._registered[region] = handle, Registration(handle.lkey, handle.rkey, base)
            return self._registered[region][1]

    def forget(self, region: Region) -> None:
        """On return the NIC refuses every access to the region, by us and by peers."""
        with self._lock:
            known = self._registered.pop(region, None)
            if known is not None:
                with _verb(f"{region.length} bytes cannot be deregistered from {self.nic.name}"):
                    known[0].close()

    @property
    def registrations(self) -> int:
        return len(self._registered)

    def answering_queue(self) -> Any:
        """A completion queue for queue pairs that never post anything."""
        with self._lock:
            if self._answering is None:
                self._answering = _pyverbs().CQ(self.context, 1, None, None, 0)
            return self._answering

    def close(self) -> None:
        """Registrations, protection domain, context. Its queue pairs are closed before."""
        with self._lock:
            handles = [handle for handle, _ in self._registered.values()]
            self._registered.clear()
        for resource in (*handles, self._answering, getattr(self, "pd", None), self.context):
            _close(resource)


def _register(pd: Any, region: Region) -> tuple[Any, int]:
    """Make memory known to a NIC; the handle and the address by which work requests name the first byte.

    The one place that tells kinds of memory apart. Memory of a GPU whose driver exports it as a dmabuf has the address
    ``offset`` for its first byte. What cannot be registered so is staged from then on.
    """
    names = _pyverbs()
    memory = region.device
    access = names.e.IBV_ACCESS_LOCAL_WRITE
    if region.access >= Access.READ:
        access |= names.e.IBV_ACCESS_REMOTE_READ
    if region.access >= Access.READ_WRITE:
        access |= names.e.IBV_ACCESS_REMOTE_WRITE
    if memory is None:
        return names.MR(pd, region.length, access, address=region.address), region.address
    try:
        exported = memory.dmabuf()
        if exported is None:
            raise VerbsError(f"memory on {region.location} is not offered as a dmabuf")
        fd, offset = exported
        try:
            return names.DmaBufMR(pd, region.length, access, dmabuf=fd, offset=offset), offset
        finally:
            os.close(fd)
    except BaseException:
        region.direct = False  # from now on it is staged
        raise


def _close(resource: Any) -> None:
    if resource is None:
        return
    try:
        resource.close()
    except Exception:  # a removed device answers with errors; there is nothing left to free then
        _log.warning("closing %s failed", type(resource).__name__, exc_info=True)


def _character_device(name: str) -> Path | None:
    """Its entry goes away as soon as somebody removes the device, while the device stays until it is closed."""
    with contextlib.suppress(OSError):
        for entry in _UVERBS.iterdir():
            with contextlib.suppress(OSError):
                if (entry / "ibdev").read_text().strip() == name:
                    return entry
    return None


def _find_gid(table: Any, nic: Nic) -> tuple[int, bytes]:
    """Index and value of the GID that the NIC is configured with, by RoCE v2 if it can be had; else the best one."""
    gids = [
        Gid(entry.gid_index, _GID_KINDS.get(entry.gid_type, ""), _gid_text(entry))
        for entry in table
        if entry.port_num == nic.port
    ]
    if nic.address:
        wanted = IPv6Address(nic.address)
        gids = [gid for gid in gids if IPv6Address(gid.text) == wanted]
    chosen = choose_gid(gids)
    if chosen is None:
        raise VerbsError(f"port {nic.port} of {nic.name} has no GID {nic.address}")
    return chosen.index, IPv6Address(chosen.text).packed


def _gid_text(entry: Any) -> str:
    text = entry.gid_str
    return str(text() if callable(text) else text)


class QueuePair:
    """One end of a reliable connection. One thread uses it at a time.

    Either it posts, two times ``device.post_work`` requests at most, and has a completion queue of its own; or it only
    answers the other end's one-sided work, for which its NIC needs nobody.
    """

    def __init__(self, device: Device, *, posts: bool) -> None:
        """
        Raises:
            VerbsError: the device has no room.
        """
        self._names = names = _pyverbs()
        self.device = device
        self._posts = posts
        depth = 2 * device.post_work if posts else 1
        self._channel: Any = None
        self._queue: Any = None
        self._pair: Any = None
        self.fd = -1
        """Readable when a completion came after :meth:`arm`; -1: not known, poll instead."""
        try:
            with _verb(f"no queue pair on {device.nic.name}"):
                if posts:
                    self._channel, self.fd = _open_channel(names, device.context)
                    # every work request may end in a completion when the queue pair breaks
                    self._queue = names.CQ(device.context, depth + 1, None, self._channel, 0)
                queue = self._queue or device.answering_queue()
                room = names.QPCap(max_send_wr=depth, max_recv_wr=1, max_send_sge=1, max_recv_sge=1)
                wanted = names.QPInitAttr(qp_type=names.e.IBV_QPT_RC, scq=queue, rcq=queue, cap=room, sq_sig_all=0)
                self._pair = names.QP(device.pd, wanted)
                self.number = int(self._pair.qp_num)
        except BaseException:
            self.close()
            raise

    def half(self, first_packet: int, mtu: int, reads: int) -> Half:
        """What the other end needs to know of this one."""
        device = self.device
        return Half(device.gid, device.lid, self.number, first_packet, mtu, reads, device.max_message)

    def connect(self, remote: Half, first_packet: int, mtu: int, reads: int) -> None:
        """To the other end; ``mtu`` and ``reads`` are what both agreed on.

        Raises:
            VerbsError: no route to it, or a value the device does not take.
        """
        names = _pyverbs()
        nic = self.device.nic
        given = names.QPAttr(port_num=nic.port, path_mtu=mtu)
        if not self._posts:
            given.qp_access_flags = names.e.IBV_ACCESS_REMOTE_READ | names.e.IBV_ACCESS_REMOTE_WRITE
        given.dest_qp_num = remote.queue_pair
        given.rq_psn = remote.first_packet
        given.sq_psn = first_packet
        given.max_rd_atomic = reads if self._posts else 1
        given.max_dest_rd_atomic = 1 if self._posts else reads
        given.min_rnr_timer = _MIN_RNR_TIMER
        given.timeout = _ACK_TIMEOUT
        given.retry_cnt = given.rnr_retry = _RETRIES
        with _verb(f"{nic.name} cannot be connected"):
            gid = names.GID(str(IPv6Address(remote.gid).exploded))
            route = names.GlobalRoute(dgid=gid, sgid_index=self.device.gid_index, hop_limit=_HOPS)
            given.ah_attr = names.AHAttr(port_num=nic.port, is_global=1, gr=route, dlid=remote.lid)
            self._pair.to_rts(given)

    def post(self, opcode: Opcode, work: Sequence[Work]) -> None:
        """At most ``device.post_work`` requests, in this order; the last one's success completes them all.

        Raises:
            VerbsError: the queue pair is broken.
        """
        spare = _spare_chains[opcode]
        try:
            chain = spare.pop()
        except IndexError:
            chain = _WorkChain(opcode)
        try:
            chain.post(self._pair, work)
        except self._names.PyverbsError as error:
            raise VerbsError(f"cannot post: {error}") from None
        finally:
            spare.append(chain)

    def ping(self) -> None:
        """Post a WRITE of no bytes, which needs no memory: it completes when the way there and back works.

        Raises:
            VerbsError
        """
        names = _pyverbs()
        place = names.SGE(0, 0, 0)
        request = names.SendWR(opcode=names.e.IBV_WR_RDMA_WRITE, num_sge=1, sg=[place])
        try:
            request.num_sge = 0
            with _verb("cannot post"):
                self._pair.post_send(request)
        finally:
            request.close()
            place.close()

    def poll(self) -> int | None:
        """Status of the next completion (``SUCCESS`` or one of ``ibv_wc_status``), None if there is none yet.

        Raises:
            VerbsError
        """
        try:
            count, completions = self._queue.poll(1)
        except self._names.PyverbsError as error:
            raise VerbsError(f"cannot poll: {error}") from None
        return int(completions[0].status) if count else None

    def arm(self) -> None:
        """From now on the next completion makes ``fd`` readable. Poll once more after it, before waiting.

        Raises:
            VerbsError
        """
        with _verb("cannot arm"):
            self._queue.req_notify()

    def acknowledge(self) -> None:
        """``fd`` was readable."""
        with contextlib.suppress(VerbsError), _verb("no event"):
            self._channel.get_cq_event(self._queue)
            self._queue.ack_events(1)

    def close(self) -> None:
        """On return the NIC neither reads nor writes memory for it any more. Idempotent."""
        pair, queue, channel = self._pair, self._queue, self._channel
        self._pair = self._queue = self._channel = None
        self.fd = -1
        for resource in (pair, queue, channel):
            _close(resource)


class _WorkChain:
    """Linked work requests, filled again for each post. A post uses the tail: so the last one, the only one that makes
    a completion, is always the same."""

    def __init__(self, opcode: Opcode) -> None:
        names = _pyverbs()
        kind = names.e.IBV_WR_RDMA_READ if opcode is Opcode.READ else names.e.IBV_WR_RDMA_WRITE
        places: list[Any] = []
        requests: list[Any] = []
        flags = names.e.IBV_SEND_SIGNALED
        for _ in range(POST_WORK):
            place = names.SGE(0, 0, 0)
            following = requests[-1] if requests else None
            request = names.SendWR(opcode=kind, num_sge=1, sg=[place], send_flags=flags, next_wr=following)
            request.sg_list = place  # was a copy; from now on what is set in the place counts
            places.append(place)
            requests.append(request)
            flags = 0
        self._places = places[::-1]
        self._requests = requests[::-1]

    def post(self, pair: Any, work: Sequence[Work]) -> None:
        first = POST_WORK - len(work)
        at = first
        places, requests = self._places, self._requests
        for local, lkey, remote, rkey, length in work:
            place = places[at]
            place.addr = local
            place.lkey = lkey
            place.length = length
            requests[at].set_wr_rdma(rkey, remote)
            at += 1
        pair.post_send(requests[first])


_spare_chains: dict[Opcode, list[_WorkChain]] = {Opcode.READ: [], Opcode.WRITE: []}
"""As many as posted at the same time once; kept for good, see the module."""
