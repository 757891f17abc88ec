"""The topology matrix: which NICs are near to which memory (Mooncake §3.2.3, topology-aware path selection). Pure.

:class:`Topology` is the matrix that is published with a segment; :func:`build_topology` makes it of an inventory."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pinyon.transfer.types.errors import InvalidTransfer
from pinyon.transfer.types.inventory import Inventory, NicInfo, pci_distance, usable_nics
from pinyon.transfer.types.nic import check_name

WILDCARD = "*"
"""The row for every location that has no row of its own."""
MAX_LOCATION_CHARS = 64
MAX_LOCATIONS = 1024
MAX_LOCATION_NICS = 64
MAX_JSON_CHARS = 1 << 23

Row = tuple[tuple[str, ...], tuple[str, ...]]


@dataclass(frozen=True)
class Topology:
    """The names of the preferred and of the secondary NICs per memory location; immutable and hashable.

    Too many locations or NICs, a bad name, or a NIC twice for one location raise InvalidTransfer, which names the
    location."""

    rows: Mapping[str, Row]
    """Rows like ``{"cpu:0": (("mlx5_2",), ("mlx5_3",))}``; either list may be empty."""

    def __post_init__(self) -> None:
        if len(self.rows) > MAX_LOCATIONS:
            raise InvalidTransfer(f"a topology has at most {MAX_LOCATIONS} locations", field="topology")
        for location, row in self.rows.items():
            _check_row(location, row)
        object.__setattr__(self, "rows", dict(self.rows))

    def __hash__(self) -> int:
        return hash(tuple(sorted(self.rows.items())))

    @cached_property
    def nics(self) -> tuple[str, ...]:
        """All NIC names, each once, in the order of their first mention."""
        return tuple(dict.fromkeys(name for row in self.rows.values() for names in row for name in names))

    def preferred(self, location: str) -> tuple[str, ...]:
        """Returns the NICs to use first. An unknown location has the row ``"*"``, or all NICs if there is none."""
        return self._row(location)[0]

    def secondary(self, location: str) -> tuple[str, ...]:
        """Returns the NICs to use when the preferred ones fail."""
        return self._row(location)[1]

    def _row(self, location: str) -> Row:
        return self.rows.get(location) or self.rows.get(WILDCARD) or (self.nics, ())

    def restricted(self, names: Collection[str]) -> Topology:
        """Returns the same matrix with only these NICs."""

        def kept(row: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(name for name in row if name in names)

        return Topology({location: (kept(first), kept(second)) for location, (first, second) in self.rows.items()})

    def to_dict(self) -> dict[str, list[list[str]]]:
        """Returns Mooncake's form: ``{"cpu:0": [["mlx5_2"], ["mlx5_3"]]}``."""
        return {location: [list(names) for names in row] for location, row in self.rows.items()}

    @classmethod
    def from_dict(cls, value: Any) -> Topology:
        """Reads outside data in the form of :meth:`to_dict`; raises InvalidTransfer if it breaks form or bounds."""
        if not isinstance(value, dict):
            raise InvalidTransfer('a topology is an object like {"cpu:0": [["eth0"], ["eth1"]]}', field="topology")
        if len(value) > MAX_LOCATIONS:
            raise InvalidTransfer(f"a topology has at most {MAX_LOCATIONS} locations", field="topology")
        return cls({location: _row_of(location, row) for location, row in value.items()})

    def to_json(self) -> str:
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> Topology:
        """Parses Mooncake's JSON form; raises InvalidTransfer for other text, a location twice, or no topology."""
        if len(text) > MAX_JSON_CHARS:
            raise InvalidTransfer(f"a topology has at most {MAX_JSON_CHARS} characters", field="topology")
        try:
            value = json.loads(text, object_pairs_hook=_unique)
        except (ValueError, RecursionError) as error:
            raise InvalidTransfer(f"a topology that is not JSON: {error}", field="topology") from None
        return cls.from_dict(value)


def _shown(location: object) -> str:
    """Returns a location for a message, shortened because a bad one may be long."""
    text = repr(location)
    return text if len(text) <= MAX_LOCATION_CHARS + 2 else f"{text[:MAX_LOCATION_CHARS]}…"


def _row_of(location: Any, value: Any) -> Row:
    if (
        not isinstance(value, list | tuple)
        or len(value) != 2
        or not all(isinstance(names, list | tuple) for names in value)
    ):
        raise InvalidTransfer(
            f"topology, location {_shown(location)}: two lists are needed, [[preferred NICs], [secondary NICs]]",
            field="topology",
        )
    return tuple(value[0]), tuple(value[1])


def _check_row(location: object, row: Row) -> None:
    where = f"topology, location {_shown(location)}"
    if (
        not isinstance(location, str)
        or not 0 < len(location) <= MAX_LOCATION_CHARS
        or not location.isprintable()
        or " " in location
    ):
        raise InvalidTransfer(
            f"{where}: a location has 1 to {MAX_LOCATION_CHARS} printable characters", field="topology"
        )
    names = (*row[0], *row[1])
    if len(names) > MAX_LOCATION_NICS:
        raise InvalidTransfer(f"{where}: more than {MAX_LOCATION_NICS} NICs", field="topology")
    for name in names:
        check_name(name, where)
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidTransfer(f"{where}: {twice!r} is there twice", field="topology")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for location, row in pairs:
        if location in value:
            raise InvalidTransfer(f"topology, location {_shown(location)}: it is there twice", field="topology")
        value[location] = row
    return value


def build_topology(inventory: Inventory, kind: str = "rdma", names: Collection[str] = ()) -> Topology:
    """Builds the matrix over NUMA nodes (``cpu:N``) and GPUs (``cuda:N``) of one kind of NIC, ``"rdma"`` or ``"tcp"``.

    With ``"all"`` it has both, rdma first. A node prefers the NICs on it and those whose node is not known; without any
    it prefers all that are up. A GPU prefers the NICs at the shortest PCIe distance. NICs that are down are secondary.
    Of more NICs than a row holds (64), the nearest are kept. ``names``: see :func:`usable_nics`. Raises InvalidTransfer
    for another kind."""
    if kind not in ("rdma", "tcp", "all"):
        raise InvalidTransfer(f"no such kind of NIC: {kind!r}", field="kind")
    rows: dict[str, Row] = {}
    for each in ("rdma", "tcp") if kind == "all" else (kind,):
        nics = usable_nics(inventory, each, names)
        up = [nic for nic in nics if nic.up]
        for node in inventory.nodes:
            near = [nic for nic in up if nic.numa is None or nic.numa == node.id]
            _add(rows, f"cpu:{node.id}", near or up, nics)
        for gpu in inventory.gpus:
            distances = [pci_distance(gpu, nic) for nic in up]
            shortest = min(distances, default=None)
            nearest = [nic for nic, far in zip(up, distances, strict=True) if far == shortest]
            _add(rows, f"cuda:{gpu.index}", nearest, nics)
    return Topology(rows)


def _add(rows: dict[str, Row], location: str, preferred: Iterable[NicInfo], nics: Iterable[NicInfo]) -> None:
    """Adds NICs to the location's row, the preferred ones first, as far as it has room."""
    first, second = rows.get(location, ((), ()))
    room = MAX_LOCATION_NICS - len(first) - len(second)
    names = [nic.name for nic in preferred][:room]
    rest = [nic.name for nic in nics if nic.name not in names][: room - len(names)]
    rows[location] = (*first, *names), (*second, *rest)
