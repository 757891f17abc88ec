"""An opened port of an HCA (an RDMA NIC), with the memory registrations that our own transfers need."""

from __future__ import annotations

import os
import threading
from ipaddress import IPv6Address
from typing import Any

from pinyon.transfer.memory.region import Access, Region
from pinyon.transfer.transports.rdma.verbs import VerbsError, character_device, free, pyverbs, verb
from pinyon.transfer.transports.rdma.wire import MAX_MESSAGE_BYTES, MAX_READS
from pinyon.transfer.types.inventory import Gid, choose_gid
from pinyon.transfer.types.nic import Nic

POST_WORK = 128
"""The maximum number of work requests of one post, if the HCA has room for two posts."""
_GIDS = 1024
_WANTED_READS = 16
"""The maximum number of outstanding READs of a queue pair: as many as common HCAs offer."""
_PORT_ACTIVE = 4
_GID_KINDS = {0: "IB/RoCE v1", 1: "IB/RoCE v1", 2: "RoCE v2"}


class Hca:
    """An opened port of an HCA, with a protection domain. Thread-safe; owned by ``HcaTable``."""

    def __init__(self, nic: Nic) -> None:
        """Opens the port. Raises VerbsError if there is no such HCA, its port is inactive, or it has no usable GID."""
        names = pyverbs()
        self.nic = nic
        self._lock = threading.Lock()
        self._registered: dict[Region, tuple[Any, tuple[int, int]]] = {}
        self._answering: Any = None
        with verb(f"{nic.name} cannot be opened"):
            self.context = names.Context(name=nic.name)
        try:
            self._character_device = character_device(nic.name)
            with verb(f"{nic.name} does not work"):
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
        """True while the port is active and nobody wants to remove the HCA."""
        try:
            with verb(self.nic.name):
                return self.present and self.context.query_port(self.nic.port).state == _PORT_ACTIVE
        except VerbsError:
            return False

    @property
    def present(self) -> bool:
        """False once the HCA is gone or is being removed; its removal waits until we have closed it."""
        return self._character_device is None or self._character_device.exists()

    def register(self, region: Region) -> tuple[int, int]:
        """Returns the NIC's key and the address of the first byte, by which our own work requests name the region.

        The registration is made at first use and ends with :meth:`forget`. Raises VerbsError if the region was
        unregistered meanwhile, or the NIC has no room."""
        known = self._registered.get(region)
        if known is not None:
            return known[1]
        with self._lock:
            if not region.alive:
                raise VerbsError("the region is not registered any more")
            if region not in self._registered:
                handle, base = register_memory(self.pd, region, 0, region.length, Access.NONE)
                self._registered[region] = handle, (handle.lkey, base)
            return self._registered[region][1]

    def forget(self, region: Region) -> None:
        """Ends the registration: from then on the NIC refuses every work request of ours on the region."""
        with self._lock:
            known = self._registered.pop(region, None)
            if known is not None:
                with verb(f"{region.length} bytes cannot be deregistered from {self.nic.name}"):
                    known[0].close()

    def answering_queue(self) -> Any:
        """Returns the completion queue for queue pairs that never post anything."""
        with self._lock:
            if self._answering is None:
                self._answering = pyverbs().CQ(self.context, 1, None, None, 0)
            return self._answering

    def close(self) -> None:
        """Frees registrations, protection domain and context. The queue pairs were closed before."""
        with self._lock:
            handles = [handle for handle, _ in self._registered.values()]
            self._registered.clear()
        for resource in (*handles, self._answering, getattr(self, "pd", None), self.context):
            free(resource)


def register_memory(pd: Any, region: Region, start: int, length: int, access: Access) -> tuple[Any, int]:
    """Makes bytes of a region known to a NIC, and open to peers as far as ``access`` says.

    Returns the handle and the address by which work requests name the first of these bytes. Only this function tells
    kinds of memory apart. GPU memory that its driver exports as a dmabuf has the address ``offset`` for its first byte.
    GPU memory that cannot be registered in this way is staged from then on. Raises VerbsError."""
    names = pyverbs()
    memory = region.device
    rights = names.e.IBV_ACCESS_LOCAL_WRITE
    if access & Access.READ:
        rights |= names.e.IBV_ACCESS_REMOTE_READ
    if access & Access.WRITE:
        rights |= names.e.IBV_ACCESS_REMOTE_WRITE
    with verb(f"{length} bytes cannot be registered (see ulimit -l)"):
        if memory is None:
            address = region.address + start
            return names.MR(pd, length, rights, address=address), address
        try:
            exported = memory.dmabuf()
            if exported is None:
                raise VerbsError(f"memory on {region.location} is not offered as a dmabuf")
            fd, offset = exported
            try:
                address = offset + start
                return names.DmaBufMR(pd, length, rights, dmabuf=fd, offset=address), address
            finally:
                os.close(fd)
        except BaseException:
            region.direct = False
            raise


def _find_gid(table: Any, nic: Nic) -> tuple[int, bytes]:
    """Returns index and value of the GID that the NIC is configured with, for RoCE v2 if possible; else of the best."""
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
