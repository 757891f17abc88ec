"""The ``pinyon topology`` command: this host's devices, and the NICs that move its memory."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from ipaddress import IPv6Address
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console

from pinyon.cli.tables import table
from pinyon.core.errors import InvalidArgument
from pinyon.transfer.host.discovery import TOPOLOGY_ENV, configured_topology, discover
from pinyon.transfer.types.inventory import Inventory, NicInfo, choose_gid, usable_nics
from pinyon.transfer.types.topology import Topology, build_topology

_DESCRIPTION = f"""\
Show this host's NUMA nodes, GPUs and NICs, and the topology matrix: per memory location the NICs that transfers use
first (preferred) and those they use when these fail (secondary).

The environment variable {TOPOLOGY_ENV} replaces the matrix, here and in every pinyon service. It holds JSON
text, or the path of a JSON file, in the form that --json prints: {{"cpu:0": [["mlx5_2"], ["mlx5_3"]]}}"""


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "topology", help="show this host's NICs and which memory they are near to", description=_DESCRIPTION
    )
    parser.add_argument("--json", action="store_true", help="print the matrix alone, as JSON")
    parser.add_argument(
        "--transport", choices=("rdma", "tcp"), help="default: rdma where there are RDMA NICs, else tcp"
    )
    parser.add_argument("--root", type=Path, default=Path("/"), metavar="DIR", help="where /sys is found (default /)")
    parser.set_defaults(run=topology)


def topology(arguments: argparse.Namespace) -> int:
    """Prints the matrix; for people, with what it was made from."""
    sysfs = arguments.root / "sys"
    if not sysfs.is_dir():
        raise InvalidArgument(f"no directory {sysfs}", field="root")
    inventory = discover(arguments.root)
    kind = arguments.transport or ("rdma" if usable_nics(inventory, "rdma") else "tcp")
    given = configured_topology() if arguments.root == Path("/") else None
    matrix = build_topology(inventory, kind) if given is None else given
    if arguments.json:
        sys.stdout.write(f"{matrix.to_json()}\n")
        return 0
    console = Console(highlight=False)
    _print_host(console, inventory)
    _print_nics(console, inventory)
    _print_matrix(console, matrix, kind if given is None else f"given by {TOPOLOGY_ENV}")
    unknown = [name for name in matrix.nics if name not in {nic.name for nic in inventory.nics}]
    if unknown:
        console.print(f"No NIC of this host: {', '.join(unknown)}", markup=False)
    return 0


def _print_host(console: Console, inventory: Inventory) -> None:
    nodes = [(f"cpu:{node.id}", _ranges(node.cpus) or "none") for node in inventory.nodes]
    _print_section(console, "NUMA nodes", ("node", "CPUs"), nodes)
    gpus = [(f"cuda:{gpu.index}", _node(gpu.numa), gpu.pci[-1] if gpu.pci else "") for gpu in inventory.gpus]
    if gpus:
        _print_section(console, "GPUs", ("GPU", "node", "PCI address"), gpus)


def _print_nics(console: Console, inventory: Inventory) -> None:
    used = (*usable_nics(inventory, "rdma"), *usable_nics(inventory, "tcp"))
    columns = ("NIC", "kind", "speed", "node", "state", "PCI address", "address")
    rows = [
        (
            *(nic.name, nic.kind, _speed(nic.speed_mbit), _node(nic.numa), "up" if nic.up else "down"),
            *(nic.pci[-1] if nic.pci else "", _address(nic)),
        )
        for nic in used
    ]
    if used:
        _print_section(console, "NICs", columns, rows)
    if not any(nic.kind == "rdma" for nic in used):
        console.print("No RDMA NICs here; transfers between hosts use tcp.\n")
    left = [f"{nic.name} ({_why(nic)})" for nic in inventory.nics if nic not in used]
    if left:
        console.print(f"Not used: {', '.join(left)}\n", markup=False)


def _print_matrix(console: Console, matrix: Topology, source: str) -> None:
    rows = [(location, *(" ".join(nics) or "–" for nics in both)) for location, both in matrix.rows.items()]
    _print_section(console, f"Topology matrix ({source})", ("memory", "preferred", "secondary"), rows)


def _print_section(console: Console, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    console.print(f"[italic]{title}[/italic]", table(columns, rows), "", sep="\n")


def _ranges(numbers: Iterable[int]) -> str:
    """Returns numbers as ranges: 0, 1, 2, 3, 8 → ``"0-3,8"``."""
    runs = [[n for _, n in run] for _, run in groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0])]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _node(numa: int | None) -> str:
    return "any" if numa is None else f"cpu:{numa}"


def _speed(mbit: int | None) -> str:
    if mbit is None:
        return "–"
    return f"{mbit / 1000:g} Gb/s" if mbit >= 1000 else f"{mbit} Mb/s"


def _address(nic: NicInfo) -> str:
    gid = choose_gid(nic.gids)
    if gid is not None:
        address = IPv6Address(gid.text)
        return f"{address.ipv4_mapped or address} (gid {gid.index})"
    if nic.kind == "rdma":
        return "no gid"
    return "not known" if nic.addresses is None else ", ".join(nic.addresses[:1])


def _why(nic: NicInfo) -> str:
    if nic.loopback:
        return "loopback"
    if nic.addresses == () and not nic.enslaved:
        return "no address"
    return "virtual" if nic.virtual else "part of another"
