"""Small fleets by hand."""

from __future__ import annotations

from collections.abc import Sequence

from pinyon.core.layout import KvLayout
from pinyon.core.request import Role
from pinyon.placement.fleet import Fleet
from pinyon.placement.hotness_tree import HotnessSettings
from pinyon.placement.index import BlockIndex
from pinyon.placement.inflight import EXPECTED_KEYS_MAX, InFlightTable
from pinyon.placement.instances import InstanceInfo, InstanceState
from pinyon.placement.pairs import Pairs
from pinyon.placement.pinyon import PinyonSettings
from pinyon.placement.policy import PlacementRequest

LAYOUT = KvLayout(layers=2, kv_heads=2, head_dim=16, block_tokens=16)
PREFILL, DECODE, MIXED, STORE = Role


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def keys(*numbers: int) -> bytes:
    return b"".join(key(number) for number in numbers)


def info(name: str, role: Role, boot: str = "1", **changes: object) -> InstanceInfo:
    worker = role is not Role.STORE
    values: dict[str, object] = {
        "instance_id": name,
        "boot_id": boot,
        "role": role,
        "address": f"{name}:1",
        "model": "m" if worker else "",
        "model_fingerprint": "f" if worker else "",
        "layout": LAYOUT if worker else None,
        "capacity_blocks": 1000,
        "max_batch": 16,
        "max_context_tokens": 8192 if worker else 0,
    }
    return InstanceInfo(**{**values, **changes})  # type: ignore[arg-type]


def make_fleet(
    *members: tuple[str, Role],
    inflight_max: int = 100,
    instances_max: int = 64,
    expected_keys_max: int = EXPECTED_KEYS_MAX,
) -> Fleet:
    inflight = InFlightTable(inflight_max, 10.0, 60.0, 600.0, expected_keys_max)
    fleet = Fleet(BlockIndex(10_000), inflight, instances_max)
    for name, role in members:
        fleet.join(info(name, role), 0.0)
    return fleet


def member(fleet: Fleet, name: str) -> InstanceState:
    state = fleet.get(name)
    assert state is not None
    return state


def id_of_pair(fleet: Fleet, places: set[int]) -> str:
    """Returns the id of a request for model ``m`` without keys, whose pair of instances is at these places of the pool.

    The pair is chosen by pinyon's defaults."""
    options, (pool,) = PinyonSettings(), fleet.pools("m")
    pairs = Pairs(HotnessSettings(), options.virtual_nodes, options.seed, options.key_tokens)
    names = (f"r{number}" for number in range(1000))
    return next(name for name in names if set(pairs.places_of(PlacementRequest(name, "m", 1), pool, 0.0)) == places)


def hold(fleet: Fleet, name: str, numbers: Sequence[int]) -> None:
    """Sets the instance's whole content."""
    fleet.index.apply_snapshot(member(fleet, name), 0, keys(*numbers), first=True, last=True)
