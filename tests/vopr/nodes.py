"""Store nodes of the simulation: the real composition root of a node, in a process that can freeze and die."""

from __future__ import annotations

import asyncio
from typing import Any

from prometheus_client import CollectorRegistry

from pinyon.core.errors import PinyonError
from pinyon.runtime.service import ServiceContext
from pinyon.runtime.telemetry import Telemetry
from services.kvstore.app import serving
from services.kvstore.settings import KvStoreSettings
from tests.vopr.disk import SimDisk
from tests.vopr.loop import Process
from tests.vopr.network import SimServer

BASE = KvStoreSettings(redis_url="redis://redis:6379/0", drain_s=0.5)
ALIGNMENT, SECTOR = 64, 4096
DISK_CRASH_SHARE = 0.6
"""The share of crashes that take the machine down, so that what was not synced may be lost."""


class NodeProcess(Process):
    """One life of a store node."""

    node: Any = None
    publisher: Any = None
    copier: Any = None
    second_copies: Any = None
    engine: Any = None

    def __init__(self, world: Any, name: str, disk: SimDisk | None) -> None:
        super().__init__(world.loop, name, world.random)
        self.world, self.disk = world, disk
        self.address = f"{name}:7000"
        self.ready = False
        self._context: ServiceContext | None = None
        plan = world.plan
        slots = [SECTOR if each in world.disks else max(ALIGNMENT, plan.longest) for each in world.names]
        pool = plan.pool_objects * sum(slots)
        slot = SECTOR if disk is not None else max(ALIGNMENT, plan.longest)
        update = {
            "listen": self.address,
            "instance_id": name,
            "pool_mib": plan.pool_objects * slot + world.random.choice([0, 64]),
            "disk_dir": name if disk is not None else "",
            "node_lease_s": plan.node_lease_s,
            "tenant_quotas": plan.quotas.format(quarter=pool // 4, half=pool // 2),
            "pinned_share": plan.pinned_share,
        }
        self._settings = BASE.model_copy(update=update)
        self.spawn(self._run(), "main")

    def served(self, server: SimServer) -> SimServer:
        """Takes the process's server, which its servicers are added to."""
        server.taps.append(lambda method, request, reply: self.world.checker.tap(self, method, request, reply))
        return server

    async def _run(self) -> None:
        world = self.world
        self._context = context = ServiceContext(
            "kvstore", self.name, Telemetry("kvstore", self.name), CollectorRegistry(), asyncio.Event()
        )
        try:
            async with serving(self._settings, context):
                self.ready = True
                world.note(f"{self.name} is ready with {len(self.node.table.keys())} objects")
                await context.stopping.wait()
                world.note(f"{self.name} stops")
        except PinyonError as error:
            world.note(f"{self.name} ended: {error.message}")
        self.over()

    def stop(self) -> None:
        """Asks the process to stop, as SIGTERM does."""
        if self._context is not None:
            self._context.stopping.set()

    def over(self) -> None:
        """Ends the process: it is gone for all others."""
        if not self.dead:
            self._count()
            self.kill()
            self.world.buried(self)

    def crash(self) -> None:
        """Ends the process without a warning; perhaps the machine as well."""
        log = None if self.node is None or self.node.tier is None else self.node.tier.log
        self.over()
        if self.disk is None or log is None or not self.ready:
            return
        if self.world.random.random() < DISK_CRASH_SHARE:
            self.disk.crash()
        # A region that is begun has not synced the one before until its first group is written.
        newest = log._generation - (not log._region.end)
        old = [each for each in map(log.find, log) if each and log._region_of(each.offset).generation < newest]
        self.world.survivors[self.name] = [(each.key, each.offset) for each in old]

    def look_at_disk(self) -> None:
        """Checks what was found: nothing that is not whole, and all that was on the disk for good."""
        if self.disk is None or self.node.tier is None:  # the disk failed at the start
            return
        world, log = self.world, self.node.tier.log
        world.covered["recovered objects"] += len(log)
        world.checker.inspect_disk(self, self.disk)
        expected = world.survivors.pop(self.name, [])
        missed = [key for key, offset in expected if (found := log.find(key)) is None or found.offset != offset]
        if missed and not self.disk.errors and not self.disk.flips:
            again = [key for key in missed if (found := log.find(key)) is None]
            if again:
                world.checker.fail(f"{self.name} does not find {len(again)} objects that were on its disk for good")

    def _count(self) -> None:
        """Adds what this life did to what the run has covered."""
        if self.node is None:
            return
        covered, counters, table = self.world.covered, self.node.table.counters, self.node.table
        covered["evictions"] += table.eviction.evicted
        covered["promotions"] += counters.promoted
        covered["unsaved"] += counters.unsaved
        covered["corrupt found"] += counters.corrupt
        covered["puts timed out"] += counters.expired_puts
        covered["leases expired"] += counters.expired_leases
        covered["evicted for quotas"] += sum(table.quotas.evicted.values())
        covered["beyond quotas"] += counters.over_quota
        covered["pinned at the end"] += len(table.pinned)
        if self.copier is not None:
            covered["copied"] += self.copier.copied
        if self.second_copies is not None:
            covered["second copies evicted"] += self.second_copies.evicted
        if self.publisher is not None:
            covered["redis losses noticed"] += self.publisher.losses
            covered["dead nodes forgotten"] += self.publisher.forgotten
        if (tier := self.node.tier) is not None:
            covered["disk failures"] += tier.failures
            covered["saved bytes"] += tier.saved_bytes
            covered["disk rounds"] += max(0, tier.log._generation - len(tier.log._regions))
            known = self.frozen_s or (
                self.disk is not None and (self.disk.errors or self.disk.flips or self.disk.hangs)
            )
            if tier.failures and not known and not any(name == self.name for name, _ in self.world.checker.poisoned):
                self.world.checker.fail(f"{tier.failures} failures of the disk of {self.name}, which was never hurt")
        if counters.corrupt and not any(name == self.name for name, _ in self.world.checker.poisoned):
            self.world.checker.fail(f"{self.name} dropped objects as corrupt that no fault has touched")

    def rest(self) -> None:
        """Checks that nothing is left open."""
        checker, node, table = self.world.checker, self.node, self.node.table
        open_now = {
            "leases": table.leases,
            "puts": table.open_puts,
            "reserved objects": table.reserved_objects,
            "leased objects": table.leased_objects,
            "writers' keys": len(node.writers),
            "readers' keys": len(node.readers),
            "grants": self.engine.memory.grants,
            "lost bytes": table.lost_bytes,
            "pinned regions": sum(each.readers for each in node.tier.log._regions) if node.tier else 0,
        }
        left = {name: count for name, count in open_now.items() if count}
        if left:
            checker.fail(f"{self.name} at rest has {left}")

    def rest_of_quotas(self, nodes: list[NodeProcess]) -> None:
        """Checks that the node knows the pool, and keeps nothing beyond a quota that may go."""
        checker, quotas = self.world.checker, self.node.table.quotas
        pool_bytes = sum(each.node.table.capacity_bytes for each in nodes)
        if quotas.pool_bytes != pool_bytes:
            checker.fail(f"{self.name} divides quotas by {quotas.pool_bytes} bytes, and the nodes have {pool_bytes}")
        for tenant, account in quotas.accounts.items():
            limit = quotas.limit(tenant)
            if account and limit is not None and account.held > limit:
                checker.fail(f"{self.name} keeps {account.held} bytes of tenant {tenant!r}, who may have {limit}")
