"""The guest's devices, addresses, bytes on the wire, and NICs that fail, as the transport's tests need them."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import pyverbs.enums as e
from pyverbs.addr import AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context, get_device_list
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, SendWR

from tests.rdma.inside.nics import NICS, nic, packets

CHUNK, CHUNKS = 64 * 1024, 16
ACCESS = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_REMOTE_READ
LIMIT_S = 60.0
QUIET_S = 5.0


def rocev2_index(context: Context, address: str) -> int:
    """Returns the index of the RoCEv2 GID for an IPv4 address."""
    wanted = bytes(10) + b"\xff\xff" + bytes(int(part) for part in address.split("."))
    found = [
        entry.gid_index
        for entry in context.query_gid_table(16)
        if entry.gid_type == e.IBV_GID_TYPE_ROCE_V2
        and bytes.fromhex(context.query_gid(1, entry.gid_index).gid.replace(":", "")) == wanted
    ]
    assert len(found) == 1, address
    return found[0]


class End:
    """One RC queue pair with its own memory on the device of a NIC."""

    def __init__(self, name: str) -> None:
        self.context = Context(name=f"rxe_{name}")
        self.gid_index = rocev2_index(self.context, NICS[name])
        self.gid = self.context.query_gid(1, self.gid_index)
        self.pd = PD(self.context)
        self.cq = CQ(self.context, CHUNKS)
        self.memory = MR(self.pd, CHUNK * CHUNKS, ACCESS)
        capacity = QPCap(max_send_wr=CHUNKS, max_recv_wr=1)
        self.qp = QP(self.pd, QPInitAttr(qp_type=e.IBV_QPT_RC, scq=self.cq, rcq=self.cq, cap=capacity))

    def connect(self, peer: End) -> None:
        attributes = QPAttr(port_num=1, path_mtu=self.context.query_port(1).active_mtu)
        attributes.qp_access_flags = ACCESS
        route = GlobalRoute(dgid=peer.gid, sgid_index=self.gid_index)
        attributes.ah_attr = AHAttr(gr=route, is_global=1, port_num=1)
        attributes.dest_qp_num = peer.qp.qp_num
        attributes.min_rnr_timer = 12
        attributes.max_rd_atomic = attributes.max_dest_rd_atomic = 4
        # 4.096 us << 14 = 67 ms before a packet is sent again, and an error after seven repetitions
        attributes.timeout, attributes.retry_cnt, attributes.rnr_retry = 14, 7, 7
        self.qp.to_rts(attributes)

    def post(self, opcode: int, peer: End, chunk: int) -> None:
        sge = SGE(self.memory.buf + chunk * CHUNK, CHUNK, self.memory.lkey)
        request = SendWR(wr_id=chunk, opcode=opcode, num_sge=1, sg=[sge], send_flags=e.IBV_SEND_SIGNALED)
        request.set_wr_rdma(peer.memory.rkey, peer.memory.buf + chunk * CHUNK)
        self.qp.post_send(request)

    def completions(self, wanted: int) -> list[tuple[int, int]]:
        """Returns (work request, status) of the next ``wanted`` completions."""
        done: list[tuple[int, int]] = []
        give_up = time.monotonic() + LIMIT_S
        while len(done) < wanted:
            assert time.monotonic() < give_up, f"{len(done)} of {wanted} completions"
            done += [(completion.wr_id, completion.status) for completion in self.cq.poll(wanted - len(done))[1]]
        return done

    def close(self) -> None:
        for resource in (self.qp, self.memory, self.cq, self.pd, self.context):
            resource.close()


class Wire(NamedTuple):
    rail: str
    a: End
    b: End


@contextlib.contextmanager
def connected(rail: str) -> Iterator[Wire]:
    with contextlib.ExitStack() as stack:
        a, b = (stack.enter_context(contextlib.closing(End(host + rail))) for host in "ab")
        a.connect(b)
        b.connect(a)
        yield Wire(rail, a, b)


def move(wire: Wire, opcode: int, seed: int) -> None:
    """Moves all chunks from host a to b, or reads them from b, and compares them."""
    payload = random.Random(seed).randbytes(CHUNK * CHUNKS)
    source, target = (wire.a, wire.b) if opcode == e.IBV_WR_RDMA_WRITE else (wire.b, wire.a)
    source.memory.write(payload, len(payload))
    target.memory.write(bytes(len(payload)), len(payload))
    for chunk in range(CHUNKS):
        wire.a.post(opcode, wire.b, chunk)
    assert wire.a.completions(CHUNKS) == [(chunk, e.IBV_WC_SUCCESS) for chunk in range(CHUNKS)]
    assert target.memory.read(len(payload), 0) == payload


def write_until_it_stops(wire: Wire) -> None:
    """Writes without end until a write fails or none completes any more.

    After a lost carrier rxe reports either that its retries are used up or, its timer lost, nothing at all.
    """
    give_up = time.monotonic() + LIMIT_S
    quiet = time.monotonic() + QUIET_S
    for chunk in range(CHUNKS // 2):
        wire.a.post(e.IBV_WR_RDMA_WRITE, wire.b, chunk)
    while time.monotonic() < quiet:
        assert time.monotonic() < give_up, "the NIC still works"
        for completion in wire.a.cq.poll(CHUNKS)[1]:
            if completion.status != e.IBV_WC_SUCCESS:
                assert completion.status in {e.IBV_WC_RETRY_EXC_ERR, e.IBV_WC_LOC_QP_OP_ERR}
                return
            quiet = time.monotonic() + QUIET_S
            wire.a.post(e.IBV_WR_RDMA_WRITE, wire.b, completion.wr_id)


def devices() -> set[str]:
    return {device.name.decode() for device in get_device_list()}


def test_there_are_two_devices_per_host() -> None:
    assert devices() == {f"rxe_{name}" for name in NICS}


@pytest.mark.parametrize("name", NICS)
def test_an_address_is_a_rocev2_gid_with_the_mtu_of_its_rail(name: str) -> None:
    with contextlib.closing(Context(name=f"rxe_{name}")) as context:
        rocev2_index(context, NICS[name])
        port = context.query_port(1)
        assert port.state == e.IBV_PORT_ACTIVE
        assert port.active_mtu == (e.IBV_MTU_4096 if name[1] == "0" else e.IBV_MTU_1024)


@pytest.mark.parametrize("rail", ["0", "1"])
@pytest.mark.parametrize("opcode", [e.IBV_WR_RDMA_WRITE, e.IBV_WR_RDMA_READ], ids=["write", "read"])
def test_bytes_cross_the_wire(rail: str, opcode: int) -> None:
    before = packets(rail)
    with connected(rail) as wire:
        move(wire, opcode, seed=20)
        largest = 4096 if rail == "0" else 1024
    assert packets(rail) - before >= CHUNK * CHUNKS // largest


@pytest.mark.parametrize("name", ["a1", "b1"])
def test_a_link_that_goes_down_stops_only_its_rail_until_up(name: str) -> None:
    with connected("1") as wire:
        move(wire, e.IBV_WR_RDMA_WRITE, seed=21)
        nic("down", name)
        try:
            write_until_it_stops(wire)
            with connected("0") as other:
                move(other, e.IBV_WR_RDMA_WRITE, seed=22)
        finally:
            nic("up", name)
    with connected("1") as again:
        move(again, e.IBV_WR_RDMA_READ, seed=23)


@pytest.mark.parametrize("name", ["a1", "b1"])
def test_an_unplugged_device_is_gone_until_plugged_in(name: str) -> None:
    with connected("1") as wire:
        move(wire, e.IBV_WR_RDMA_WRITE, seed=24)
        nic("unplug", name)
        try:
            write_until_it_stops(wire)
            give_up = time.monotonic() + LIMIT_S
            while f"rxe_{name}" in devices():  # unplug does not wait for the device to go
                assert time.monotonic() < give_up
        finally:
            for end in wire.a, wire.b:
                end.close()
            nic("plug", name)
    with connected("1") as again:
        move(again, e.IBV_WR_RDMA_READ, seed=25)
