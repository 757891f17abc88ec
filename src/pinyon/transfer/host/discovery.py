"""Discovery of what a host has, from sysfs: NUMA nodes, GPUs, network interfaces, RDMA devices (Mooncake §3.2.3).

The kernel's ``Documentation/ABI`` describes the files (``sysfs-class-net``, ``sysfs-class-infiniband``,
``sysfs-bus-pci``). A file that is missing, cannot be read or holds nonsense means "not known"; nothing raises for it.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from ipaddress import IPv6Address, ip_interface
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from pinyon.transfer.host.interfaces import Interface, live_interfaces
from pinyon.transfer.types.errors import InvalidTransfer
from pinyon.transfer.types.inventory import Gid, GpuInfo, Inventory, NicInfo, NumaNode, choose_gid, usable_nics
from pinyon.transfer.types.nic import Nic
from pinyon.transfer.types.topology import MAX_JSON_CHARS, Topology

TOPOLOGY_ENV = "PINYON_TRANSFER_TOPOLOGY"
"""A topology matrix as JSON text, or a JSON file's path, that is used instead of what discovery finds."""

_MAX_CPUS = 1 << 16
_MAX_SPEED_MBIT = 10_000_000
"""The largest speed that is believed: above it the driver means "unknown" (some write -1 as an unsigned number)."""
_MAX_GIDS = 256
_MAX_STACKED = 8
"""Levels of interfaces, such as bonds on VLANs on bridges: the kernel allows 8."""
_LOOPBACK = "772"
"""ARPHRD_LOOPBACK."""
_NVIDIA = "0x10de"
_DISPLAY_CLASSES = ("0x0300", "0x0302")
"""VGA controller, 3D controller."""
_BRIDGE = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}")
_FUNCTION = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_TUNNEL = re.compile(r"^DEVTYPE=(vxlan|geneve)$", re.MULTILINE)
"""Interfaces on top of a physical one that wrap each packet."""


def discover(
    root: Path = Path("/"), interfaces: Mapping[str, Interface] | None = None, visible_gpus: str | None = None
) -> Inventory:
    """Returns the inventory of the host whose ``/sys`` is below ``root``.

    The ``interfaces`` have addresses, by name; the default is this namespace's if ``root`` is ``/``, else addresses are
    not known. GPUs are selected by ``visible_gpus``, written like ``CUDA_VISIBLE_DEVICES``, which is the default if
    ``root`` is ``/``; else all are visible."""
    if root == Path("/"):
        if interfaces is None:
            with contextlib.suppress(OSError):
                interfaces = live_interfaces()
        visible_gpus = os.environ.get("CUDA_VISIBLE_DEVICES") if visible_gpus is None else visible_gpus
    sysfs = root / "sys"
    nics = _net_nics(sysfs / "class/net", interfaces)
    by_name = {nic.name: nic for nic in nics}
    rdma = [_rdma_nic(path, by_name) for path in _entries(sysfs / "class/infiniband")]
    return Inventory(_nodes(sysfs / "devices/system"), (*rdma, *nics), _gpus(root, visible_gpus))


# ---------------------------------------------------------------- from an inventory to NICs and topology


def tcp_nics(inventory: Inventory, names: Iterable[str] = ()) -> tuple[Nic, ...]:
    """Returns what to publish of the interfaces that tcp may use (``usable_nics``): one address each, IPv4 before IPv6.

    The port is free to choose. With ``names`` only these are published, even virtual ones and loopback."""
    found = []
    for info in usable_nics(inventory, "tcp", tuple(names)):
        if info.addresses:
            address = ip_interface(info.addresses[0])
            found.append(Nic(info.name, "tcp", str(address.ip), 0, _network(info.addresses[0])))
    return tuple(found)


def rdma_nics(inventory: Inventory, names: Iterable[str] = ()) -> tuple[Nic, ...]:
    """Returns what to publish of the RDMA devices that have a GID: the chosen one (see ``choose_gid``)."""
    found = []
    for info in usable_nics(inventory, "rdma", tuple(names)):
        gid = choose_gid(info.gids)
        if gid is not None:
            found.append(Nic(info.name, "rdma", gid.text, info.port, _gid_network(gid, inventory)))
    return tuple(found)


def _network(address: str) -> str:
    """Returns the network; empty for a single host's prefix, as clouds give out: it says nothing of nearness."""
    network = ip_interface(address).network
    return "" if network.prefixlen == network.max_prefixlen else str(network)


def _gid_network(gid: Gid, inventory: Inventory) -> str:
    address = IPv6Address(gid.text)
    wanted = address.ipv4_mapped or address
    for info in inventory.nics:
        for text in info.addresses or ():
            if ip_interface(text).ip == wanted:
                return _network(text)
    return ""


def load_topology(value: str) -> Topology:
    """Loads a topology from JSON text or from the file of that path.

    Raises InvalidTransfer if there is no such file, or the text is not a topology."""
    if value.lstrip().startswith(("{", "[")):
        return Topology.from_json(value)
    try:
        with open(value, encoding="utf-8") as file:
            return Topology.from_json(file.read(MAX_JSON_CHARS + 1))
    except (OSError, ValueError, InvalidTransfer) as error:
        raise InvalidTransfer(f"topology file {value!r}: {error}", field="topology") from None


def configured_topology(environ: Mapping[str, str] = os.environ) -> Topology | None:
    """Returns the topology that the environment gives, or None. Raises InvalidTransfer if it is wrong."""
    value = environ.get(TOPOLOGY_ENV, "")
    if not value.strip():
        return None
    try:
        return load_topology(value)
    except InvalidTransfer as error:
        raise InvalidTransfer(f"{TOPOLOGY_ENV}: {error}", field="topology") from None


# ---------------------------------------------------------------- files


def _read(path: Path) -> str:
    """Returns the stripped text, empty when there is none; drivers answer some reads with EINVAL."""
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _read(path)
    return int(text) if re.fullmatch(r"-?[0-9]{1,18}", text) else None


def _entries(folder: Path) -> list[Path]:
    """Returns the sub-folders (also linked ones) in natural order: ``mlx5_2`` before ``mlx5_10``."""
    try:
        return sorted((path for path in folder.iterdir() if path.is_dir()), key=lambda path: _natural(path.name))
    except OSError:
        return []


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"([0-9]+)", name)]


class _NicPlace(NamedTuple):
    pci: tuple[str, ...] = ()
    numa: int | None = None


def _place(device: Path) -> _NicPlace:
    """Returns where a device is, from its real path: sysfs nests a device in the folder of the bridge it hangs on."""
    real = Path(os.path.realpath(device))
    pci = tuple(part for part in real.parts if _BRIDGE.fullmatch(part) or _FUNCTION.fullmatch(part))
    for folder in (real, *real.parents):  # a virtio device has no node, the PCI function around it does
        numa = _number(folder / "numa_node")
        if numa is not None:
            return _NicPlace(pci, numa if numa >= 0 else None)
    return _NicPlace(pci)


# ---------------------------------------------------------------- nodes and GPUs


def _nodes(system: Path) -> tuple[NumaNode, ...]:
    nodes = []
    for path in _entries(system / "node"):
        if not re.fullmatch(r"node[0-9]{1,6}", path.name):
            continue
        node = NumaNode(int(path.name.removeprefix("node")), _cpus(path / "cpulist"))
        empty = re.search(r"MemTotal:\s+0 kB", _read(path / "meminfo"))
        if node.cpus or not empty:
            nodes.append(node)
    return tuple(nodes) or (NumaNode(0, _cpus(system / "cpu/online")),)


def _cpus(path: Path) -> tuple[int, ...]:
    """Returns the CPUs of a list: 0, 1, 2, 3, 8 for ``"0-3,8"``. Parts that do not parse are left out."""
    cpus: list[int] = []
    for part in _read(path).split(","):
        bounds = re.fullmatch(r"([0-9]{1,6})(?:-([0-9]{1,6}))?", part)
        if bounds:
            first, last = int(bounds[1]), int(bounds[2] or bounds[1])
            cpus.extend(range(first, min(last, _MAX_CPUS) + 1))
    return tuple(cpus[:_MAX_CPUS])


def _gpus(root: Path, visible: str | None) -> tuple[GpuInfo, ...]:
    """Returns the GPUs that the container and ``visible`` leave, numbered as in this process: by PCI address."""
    found = [
        path
        for path in _entries(root / "sys/bus/pci/devices")
        if _read(path / "vendor") == _NVIDIA and _read(path / "class").startswith(_DISPLAY_CLASSES)
    ]
    found.sort(key=lambda path: [int(part, 16) for part in re.findall(r"[0-9a-f]+", path.name)])
    driver = root / "proc/driver/nvidia/gpus"
    granted = {path.name for path in _entries(driver)}
    if granted:  # a container sees every GPU in sysfs, but only its own here
        found = [path for path in found if path.name in granted]
    if visible is not None:
        found = list(_visible(found, visible, driver))
    return tuple(GpuInfo(index, *_place(path)) for index, path in enumerate(found))


def _visible(gpus: list[Path], selection: str, driver: Path) -> Iterator[Path]:
    """Yields the GPUs selected by number or (start of a) UUID; like CUDA, stops at the first that does not exist."""
    for item in selection.split(","):
        item = item.strip()
        if item.startswith("GPU-"):
            path = next((path for path in gpus if item in _read(driver / path.name / "information")), None)
        else:
            path = gpus[int(item)] if re.fullmatch("[0-9]{1,4}", item) and int(item) < len(gpus) else None
        if path is None:
            return
        yield path


# ---------------------------------------------------------------- network interfaces


def _net_nics(folder: Path, interfaces: Mapping[str, Interface] | None) -> list[NicInfo]:
    paths = {path.name: path for path in _entries(folder)}
    if interfaces is None:
        return [_net_nic(path, paths, None) for path in paths.values()]
    return [
        _net_nic(paths[name], paths, live)
        if name in paths and _number(paths[name] / "ifindex") == live.index
        # sysfs shows another namespace's interfaces, or is not mounted
        else NicInfo(name, "tcp", up=live.up, addresses=live.addresses, virtual=True, loopback=name == "lo")
        for name, live in sorted(interfaces.items(), key=lambda item: _natural(item[0]))
    ]


def _net_nic(path: Path, paths: Mapping[str, Path], live: Interface | None) -> NicInfo:
    place = _hardware(path, paths)
    speed = _number(path / "speed")
    return NicInfo(
        path.name,
        "tcp",
        *(place or _NicPlace()),
        speed_mbit=speed if speed is not None and 0 < speed < _MAX_SPEED_MBIT else None,
        up=_is_up(path),
        addresses=None if live is None else live.addresses,
        virtual=place is None,
        loopback=path.name == "lo" or _read(path / "type") == _LOOPBACK,
        enslaved=(path / "master").exists(),
    )


def _is_up(path: Path) -> bool:
    state = _read(path / "operstate")
    if state in ("", "unknown"):  # many virtual drivers never report a state
        return _read(path / "carrier") != "0"
    return state == "up"


def _hardware(path: Path, paths: Mapping[str, Path], depth: int = _MAX_STACKED) -> _NicPlace | None:
    """Returns where the interface's hardware is, or None. For bonds, VLANs and bridges it is that of what is below."""
    if (path / "device").exists():
        return _place(path / "device")
    if depth == 0 or _TUNNEL.search(_read(path / "uevent")):
        return None
    below = [
        place
        for entry in _entries(path)
        if entry.name.startswith("lower_") and (lower := paths.get(entry.name.removeprefix("lower_")))
        if (place := _hardware(lower, paths, depth - 1)) is not None
    ]
    if not below:
        return None
    nodes = {place.numa for place in below}
    shared = takewhile(lambda parts: len(set(parts)) == 1, zip(*(place.pci for place in below), strict=False))
    return _NicPlace(tuple(parts[0] for parts in shared), nodes.pop() if len(nodes) == 1 else None)


# ---------------------------------------------------------------- RDMA devices


def _rdma_nic(path: Path, interfaces: Mapping[str, NicInfo]) -> NicInfo:
    """Returns a device with its first active port; two-port devices that are still sold show as two devices."""
    ports = [entry for entry in _entries(path / "ports") if entry.name.isdecimal()]
    port = next((entry for entry in ports if _active(entry)), ports[0] if ports else path / "ports/1")
    gids = _gids(port)
    netdev = next((gid.netdev for gid in gids if gid.netdev), "") or _netdev(path)
    interface = interfaces.get(netdev)
    place = _place(path / "device") if (path / "device").exists() else _NicPlace()
    if not place.pci and interface is not None:  # soft-RoCE hangs on an interface
        place = _NicPlace(interface.pci, interface.numa)
    return NicInfo(
        path.name,
        "rdma",
        *place,
        speed_mbit=_rate_mbit(port),
        up=_active(port),
        addresses=interface.addresses if interface else None,
        gids=gids,
        port=int(port.name),
        virtual=not place.pci,
    )


def _active(port: Path) -> bool:
    return _read(port / "state").endswith("ACTIVE")


def _rate_mbit(port: Path) -> int | None:
    """Returns the rate written as ``"200 Gb/sec (4X HDR)"`` or ``"2.5 Gb/sec (1X SDR)"``."""
    rate = re.match(r"([0-9]{1,6}(?:\.[0-9]{1,3})?) Gb/sec", _read(port / "rate"))
    return round(float(rate[1]) * 1000) or None if rate else None


def _gids(port: Path) -> tuple[Gid, ...]:
    """Returns the used entries of the port's GID table."""
    found = []
    for index in range(_MAX_GIDS):
        text = _read(port / f"gids/{index}")
        if not text:
            break
        if _is_gid(text):
            kind = _read(port / f"gid_attrs/types/{index}")
            found.append(Gid(index, kind, text, _read(port / f"gid_attrs/ndevs/{index}")))
    return tuple(found)


def _is_gid(text: str) -> bool:
    try:
        return int(IPv6Address(text)) & ((1 << 64) - 1) != 0
    except ValueError:
        return False


def _netdev(path: Path) -> str:
    """Returns the interface of a device without GIDs: soft-RoCE names it, a PCI function lists its own."""
    return _read(path / "parent") or next((entry.name for entry in _entries(path / "device/net")), "")
