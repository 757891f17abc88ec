"""The machines of a simulated cluster: which live, and which boot of each."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from pinyon.batching.service_order import SERVICE_ORDERS
from pinyon.core.journal import Journal
from pinyon.core.layout import KvLayout
from pinyon.core.request import Role
from pinyon.decisions import FrontConfig, InstanceConfig
from pinyon.placement.fleet import Fleet
from pinyon.placement.instances import InstanceInfo
from pinyon.profiles.engine_profile import EngineProfile
from pinyon.profiles.machine_profile import MachineProfile
from pinyon_lab.simulator.cluster_settings import ClusterSettings
from pinyon_lab.simulator.engine import Engine, Faults, Owner
from pinyon_lab.simulator.host_store import HostStore
from pinyon_lab.simulator.virtual_time import VirtualTime

__all__ = ["MODEL", "JournalOf", "Members"]

MODEL = "simulated"

JournalOf = Callable[[str, InstanceConfig | FrontConfig], Journal | None]
"""Where the decisions of a part, by its name, are written."""


class Members:
    """Engines by instance id and by boot, and the stores of their hosts."""

    def __init__(
        self,
        time: VirtualTime,
        owner: Owner,
        fleet: Fleet,
        settings: ClusterSettings,
        machine: MachineProfile,
        profile: EngineProfile,
        faults: Faults | None,
        journal: JournalOf,
    ) -> None:
        self.engines: dict[str, Engine] = {}
        self.boots: dict[str, Engine] = {}
        self.stores: dict[str, HostStore] = {}
        """By instance id."""
        self.nodes: dict[str, int] = {}
        """Of every instance that has lived, by its id."""
        self._time, self._owner, self._fleet = time, owner, fleet
        self._settings, self._machine, self._profile = settings, machine, profile
        self._faults, self._journal = faults, journal
        self._layout = KvLayout(1, 1, max(1, machine.kv_token_bytes // 4), settings.block_tokens, "float16")
        self._short_first = SERVICE_ORDERS.make(settings.service_order).short_first
        self._numbers = count(1)

    def boot(self, name: str, role: Role) -> None:
        """An instance comes, or comes back, empty; with it the part of the pool on its host."""
        settings, boot = self._settings, f"{name}/{next(self._numbers)}"
        nodes = self.nodes[name] = settings.nodes(role)
        config = settings.instance(nodes)
        sizes = config.pool_blocks, config.max_batch
        chunk_tokens = min(config.chunk_tokens, config.step_tokens)
        engine = Engine(
            self._time,
            self._owner,
            self._fleet,
            InstanceInfo(
                name,
                boot,
                role,
                f"{name}:1",
                MODEL,
                "weights",
                self._layout,
                *sizes,
                stages=nodes,
                short_first=self._short_first,
                chunk_tokens=chunk_tokens,
            ),
            config,
            self._profile,
            rule=settings.step_rule,
            whole_tokens=settings.whole_tokens,
            kv_token_bytes=self._machine.kv_token_bytes,
            dram_bytes_s=nodes * self._machine.dram_bytes_s,
            scheduling=settings.scheduling,
            faults=self._faults,
            journal=self._journal(boot, config),
        )
        self.engines[name] = self.boots[boot] = engine
        pool_blocks = nodes * settings.pool_tokens // settings.block_tokens
        if pool_blocks and role.prefills:
            store = _store_of(name)
            info = InstanceInfo(store, boot, Role.STORE, f"{name}:2", on_ssd=settings.pool_on_ssd)
            self.stores[store] = HostStore(
                self._fleet, info, name, settings.pool_eviction, pool_blocks, self._time.now_s
            )

    def remove(self, name: str) -> Engine | None:
        """It dies, with the part of the pool on its host; None: it is dead."""
        victim = self.engines.pop(name, None)
        if victim is None:
            return None
        victim.alive = False
        del self.boots[victim.boot]
        self._fleet.leave(name)
        if self.stores.pop(_store_of(name), None) is not None:
            self._fleet.leave(_store_of(name))
        return victim

    def store(self, engine: Engine) -> HostStore | None:
        """On its host."""
        return self.stores.get(_store_of(engine.name))


def _store_of(name: str) -> str:
    return f"store-{name}"
