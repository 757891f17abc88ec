"""Fake sysfs trees of machines, written below a folder.

The layout is the kernel's: a device's folder lies in that of its bridge, and ``/sys/class`` holds relative links to it.
"""

from __future__ import annotations

import os
from pathlib import Path

ZERO_GID = "0000:0000:0000:0000:0000:0000:0000:0000"


def link_local_gid(index: int) -> str:
    return f"fe80:0000:0000:0000:0ac0:ebff:fe00:{index:04x}"


def ipv4_gid(address: str) -> str:
    a, b, c, d = map(int, address.split("."))
    return f"0000:0000:0000:0000:0000:ffff:{a:02x}{b:02x}:{c:02x}{d:02x}"


class SysfsTree:
    """A writer of one host's tree; ``root`` is what ``discover`` takes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.sys = root / "sys"
        self.devices = self.sys / "devices"
        self._interfaces = 0

    def write(self, path: Path, **files: object) -> Path:
        path.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (path / name).write_text(f"{text}\n")
        return path

    def link(self, path: Path, target: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(os.path.relpath(target, path.parent), target_is_directory=True)

    def node(self, number: int, cpulist: str, memory_kb: int = 1 << 20) -> None:
        meminfo = f"Node {number} MemTotal:       {memory_kb} kB"
        self.write(self.devices / f"system/node/node{number}", cpulist=cpulist, meminfo=meminfo)

    def function(self, pci: str, numa: int, *, vendor: str, kind: str) -> Path:
        """Adds a PCI function at ``"pci0000:00/0000:00:01.0/0000:01:00.0"``."""
        path = self.write(self.devices / pci, numa_node=numa, vendor=vendor, **{"class": kind})
        self.link(self.sys / "bus/pci/devices" / path.name, path)
        return path

    def gpu(self, pci: str, numa: int) -> None:
        self.function(pci, numa, vendor="0x10de", kind="0x030200")

    def interface(self, name: str, device: Path | None, *, speed: int | None = None, state: str = "up") -> Path:
        """Adds a network interface, a virtual one without ``device``."""
        self._interfaces += 1
        parent = self.devices / "virtual" if device is None else device
        path = self.write(
            parent / "net" / name, operstate=state, type=1, ifindex=self._interfaces, uevent=f"INTERFACE={name}"
        )
        if speed is not None:
            self.write(path, speed=speed)
        if device is not None:
            self.link(path / "device", device)
        self.link(self.sys / "class/net" / name, path)
        return path

    def loopback(self) -> None:
        self.write(self.interface("lo", None, state="unknown"), type=772)

    def stack(self, upper: Path, *lowers: Path) -> None:
        """Makes ``upper`` a bond or bridge of ``lowers``."""
        for lower in lowers:
            self.link(upper / f"lower_{lower.name}", lower)
            self.link(lower / "master", upper)

    def rdma(
        self,
        name: str,
        device: Path | None,
        gids: list[tuple[str, str, str]],
        *,
        rate: str = "200 Gb/sec (4X HDR)",
        state: str = "4: ACTIVE",
    ) -> Path:
        """Adds an RDMA device with one port (soft-RoCE without ``device``); ``gids`` are (type, text, interface)."""
        parent = self.devices / "virtual" if device is None else device
        path = parent / "infiniband" / name
        self.write(path / "ports/1", rate=rate, state=state)
        for index, (kind, text, netdev) in enumerate(gids):
            self.write(path / "ports/1/gids", **{str(index): text})
            if text != ZERO_GID:
                self.write(path / "ports/1/gid_attrs/types", **{str(index): kind})
                self.write(path / "ports/1/gid_attrs/ndevs", **{str(index): netdev})
        if device is not None:
            self.link(path / "device", device)
        self.link(self.sys / "class/infiniband" / name, path)
        return path

    def hca(self, index: int, pci: str, numa: int, address: str, *, speed: int = 200_000, up: bool = True) -> None:
        """Adds a ConnectX function: ``mlx5_<index>`` with its interface ``ens<index>``, in the GID order of mlx5."""
        device = self.function(pci, numa, vendor="0x15b3", kind="0x020000")
        netdev = f"ens{index}"
        self.interface(netdev, device, speed=speed if up else -1, state="up" if up else "down")
        self.rdma(
            f"mlx5_{index}",
            device,
            [
                ("IB/RoCE v1", link_local_gid(index), netdev),
                ("RoCE v2", link_local_gid(index), netdev),
                ("IB/RoCE v1", ipv4_gid(address), netdev),
                ("RoCE v2", ipv4_gid(address), netdev),
                ("", ZERO_GID, ""),
            ],
            rate=f"{speed // 1000} Gb/sec (4X)",
            state="4: ACTIVE" if up else "1: DOWN",
        )


def dgx_like(root: Path) -> SysfsTree:
    """Makes two sockets, four PCIe switches with two GPUs and two compute NICs each, a storage NIC per socket.

    Compute: mlx5_0 to 3 and 5 to 8; storage, on root ports of their own: mlx5_4 (socket 0) and mlx5_9 (socket 1)."""
    tree = SysfsTree(root)
    tree.node(0, "0-63,128-191")
    tree.node(1, "64-127,192-255")
    hca = iter([0, 1, 2, 3, 5, 6, 7, 8])
    for switch in range(4):
        numa, bus = divmod(switch, 2)[0], 0x40 * switch
        port = f"pci0000:{bus:02x}/0000:{bus:02x}:01.1/0000:{bus + 1:02x}:00.0"
        for slot in range(2):
            tree.gpu(f"{port}/0000:{bus + 2:02x}:{slot:02x}.0/0000:{bus + 3 + slot:02x}:00.0", numa)
        for slot in range(2, 4):
            index = next(hca)
            path = f"{port}/0000:{bus + 2:02x}:{slot:02x}.0/0000:{bus + 3 + slot:02x}:00.0"
            tree.hca(index, path, numa, f"10.0.{index}.1")
    tree.hca(4, "pci0000:20/0000:20:03.1/0000:21:00.0", 0, "10.9.0.1")
    tree.hca(9, "pci0000:a0/0000:a0:03.1/0000:a1:00.0", 1, "10.9.1.1")
    tree.loopback()
    tree.interface("docker0", None, state="down")
    return tree


def hgx_like(root: Path, nics: int) -> SysfsTree:
    """Makes two sockets, 8 GPUs, and a NIC under each GPU's switch (8 NICs) or each pair's switch (4 NICs)."""
    tree = SysfsTree(root)
    tree.node(0, "0-47")
    tree.node(1, "48-95")
    per_switch = 8 // nics
    for index in range(nics):
        numa, bus = index * 2 // nics, 0x10 * index
        switch = f"pci0000:{bus:02x}/0000:{bus:02x}:01.0/0000:{bus + 1:02x}:00.0"
        tree.hca(
            index, f"{switch}/0000:{bus + 2:02x}:00.0/0000:{bus + 3:02x}:00.0", numa, f"10.1.{index}.1", speed=400_000
        )
        for slot in range(1, per_switch + 1):
            tree.gpu(f"{switch}/0000:{bus + 2:02x}:{slot:02x}.0/0000:{bus + 3 + slot:02x}:00.0", numa)
    tree.loopback()
    return tree


def two_socket(root: Path) -> SysfsTree:
    """Makes two sockets without GPU or RDMA, with a 100 Gb/s NIC each."""
    tree = SysfsTree(root)
    tree.node(0, "0-31")
    tree.node(1, "32-63")
    for numa, bus in ((0, 0x17), (1, 0xB1)):
        device = tree.function(
            f"pci0000:{bus:02x}/0000:{bus:02x}:00.0/0000:{bus + 1:02x}:00.0", numa, vendor="0x8086", kind="0x020000"
        )
        tree.interface(f"ens{numa}f0", device, speed=100_000)
    tree.loopback()
    return tree


def laptop(root: Path) -> SysfsTree:
    """Makes one node, Wi-Fi that reports neither node nor speed, an empty Ethernet socket, a container bridge."""
    tree = SysfsTree(root)
    tree.node(0, "0-7")
    wifi = tree.function("pci0000:00/0000:00:1c.0/0000:02:00.0", -1, vendor="0x8086", kind="0x028000")
    tree.interface("wlp2s0", wifi)
    wired = tree.function("pci0000:00/0000:00:1f.6", -1, vendor="0x8086", kind="0x020000")
    tree.interface("enp0s31f6", wired, speed=-1, state="down")
    tree.function("pci0000:00/0000:00:02.0", -1, vendor="0x8086", kind="0x030000")
    bridge, veth = tree.interface("docker0", None), tree.interface("veth12ab", None)
    tree.stack(bridge, veth)
    tree.loopback()
    return tree
