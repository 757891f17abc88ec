"""The guest's NICs, as ``tests/rdma/nics.sh`` makes them."""

from __future__ import annotations

import fcntl
import socket
import struct
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).resolve().parent.parent / "nics.sh"
#: Host (a, b) and rail (0, 1) of each NIC, and its address; its device is ``rxe_`` + its name.
NICS = {"a0": "10.10.0.1", "a1": "10.10.1.1", "b0": "10.10.0.2", "b1": "10.10.1.2"}
UP = 1
SIOCGIFFLAGS, SIOCSIFFLAGS = 0x8913, 0x8914


def nic(action: str, name: str) -> None:
    """Applies ``down`` or ``up`` to the link of a NIC, ``unplug`` or ``plug`` to its device and link."""
    if action in ("down", "unplug"):
        link_down(name)
    subprocess.run(["sh", SCRIPT, action, name], check=True, timeout=60)


def link_down(name: str) -> None:
    """Takes a link down at once; on an emulated processor a shell might start after the transfer to interrupt."""
    interface = f"v{name}".encode()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        flags = _flags(any_socket, interface) & ~UP
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH14x", interface, flags))


def repair() -> None:
    """Restores NICs that a test left unplugged or down."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        up = {name for name in NICS if _flags(any_socket, f"v{name}".encode()) & UP}
    for name in NICS:
        if not Path(f"/sys/class/infiniband/rxe_{name}").exists():
            nic("plug", name)
        elif name not in up:
            nic("up", name)


def _flags(any_socket: socket.socket, interface: bytes) -> int:
    answer = fcntl.ioctl(any_socket, SIOCGIFFLAGS, struct.pack("16sH14x", interface, 0))
    return int(struct.unpack("16sH14x", answer)[1])
