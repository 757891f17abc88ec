"""The machines of a simulated cluster: those that live, and the boot of each."""

from __future__ import annotations

from itertools import count

from pinyon.batching.service_order import SERVICE_ORDERS
from pinyon.core.layout import KvLayout
from pinyon.core.request import Role
from pinyon.placement.fleet import Fleet
from pinyon.placement.index import BlockIndex
from pinyon.placement.inflight import InFlightTable
from pinyon.placement.instances import InstanceInfo
from pinyon_lab.simulator.engine import Owner, SimEngine
from pinyon_lab.simulator.host_store import HostStore
from pinyon_lab.simulator.world import World

MODEL = "simulated"
UNLIMITED = 1 << 40
FOREVER_S = 1e15


def endless_fleet(*, together: bool, decode_sharing: bool = True) -> Fleet:
    """Returns a fleet whose books have no limits: nothing is forgotten in virtual time."""
    inflight = InFlightTable(UNLIMITED, FOREVER_S, FOREVER_S, FOREVER_S, expected_keys_max=UNLIMITED)
    fleet = Fleet(BlockIndex(UNLIMITED), inflight, 1 << 20, together)
    fleet.loads.prefixes.used = decode_sharing
    return fleet


class Members:
    """The engines by instance id and by boot, and the stores of their hosts."""

    def __init__(self, world: World, owner: Owner) -> None:
        self.engines: dict[str, SimEngine] = {}
        self.boots: dict[str, SimEngine] = {}
        self.stores: dict[str, HostStore] = {}
        """The stores by their own ids."""
        self.nodes: dict[str, int] = {}
        """The number of nodes of every instance that has lived, by its id."""
        self._world, self._owner, self._fleet, self._settings = world, owner, world.fleet, world.settings
        kv_size = max(1, world.machine.kv_token_bytes // 4)
        self._layout = KvLayout(1, 1, kv_size, self._settings.block_tokens, "float16")
        self._short_first = SERVICE_ORDERS.make(self._settings.service_order).short_first
        self._numbers = count(1)

    def boot(self, name: str, role: Role) -> None:
        """Starts an instance, for the first time or again, empty, and with it the part of the pool on its host."""
        settings, boot = self._settings, f"{name}/{next(self._numbers)}"
        nodes = self.nodes[name] = settings.nodes(role)
        config = settings.instance(nodes)
        alike = MODEL, "weights", self._layout, config.pool_blocks, config.max_batch
        chunk, short_first = min(config.chunk_tokens, config.step_tokens), self._short_first
        info = InstanceInfo(
            name, boot, role, f"{name}:1", *alike, stages=nodes, short_first=short_first, chunk_tokens=chunk
        )
        engine = SimEngine(self._world, self._owner, info, config)
        self.engines[name] = self.boots[boot] = engine
        pool_blocks = nodes * settings.pool_tokens // settings.block_tokens
        if pool_blocks and role.prefills:
            store = _store_of(name)
            info = InstanceInfo(store, boot, Role.STORE, f"{name}:2", on_ssd=settings.pool_on_ssd)
            self.stores[store] = HostStore(
                self._fleet, info, name, settings.pool_eviction, pool_blocks, self._world.time.now_s
            )

    def remove(self, name: str) -> SimEngine | None:
        """Kills an instance with the part of the pool on its host, and returns it; None: it is dead already."""
        victim = self.engines.pop(name, None)
        if victim is None:
            return None
        victim.alive = False
        del self.boots[victim.boot]
        self._fleet.leave(name)
        if self.stores.pop(_store_of(name), None) is not None:
            self._fleet.leave(_store_of(name))
        return victim

    def store(self, engine: SimEngine) -> HostStore | None:
        """Returns the store on the engine's host."""
        return self.stores.get(_store_of(engine.name))


def _store_of(name: str) -> str:
    return f"store-{name}"
