"""The guest's devices and addresses, as the transport's tests need them.

That bytes cross the wire, and that NICs fail and come back, is seen by ``test_rdma_transport.py``."""

from __future__ import annotations

import contextlib

import pytest
import pyverbs.enums as e
from pyverbs.device import Context, get_device_list

from tests.rdma.inside.nics import NICS


def test_there_are_two_devices_per_host() -> None:
    assert {device.name.decode() for device in get_device_list()} == {f"rxe_{name}" for name in NICS}


@pytest.mark.parametrize("name", NICS)
def test_an_address_is_a_rocev2_gid_with_the_mtu_of_its_rail(name: str) -> None:
    wanted = bytes(10) + b"\xff\xff" + bytes(int(part) for part in NICS[name].split("."))
    with contextlib.closing(Context(name=f"rxe_{name}")) as context:
        found = [
            entry.gid_index
            for entry in context.query_gid_table(16)
            if entry.gid_type == e.IBV_GID_TYPE_ROCE_V2
            and bytes.fromhex(context.query_gid(1, entry.gid_index).gid.replace(":", "")) == wanted
        ]
        assert len(found) == 1
        port = context.query_port(1)
        assert port.state == e.IBV_PORT_ACTIVE
        assert port.active_mtu == (e.IBV_MTU_4096 if name[1] == "0" else e.IBV_MTU_1024)
