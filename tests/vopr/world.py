"""One run of the simulation: a world made from a seed, operations and faults, and what must hold at the end."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

from pinyon.core.errors import PinyonError
from tests.vopr import patches
from tests.vopr.checker import Checker, LogWatch
from tests.vopr.clients import ClientProcess
from tests.vopr.disk import SimDisk
from tests.vopr.engine import Wire
from tests.vopr.faults import FAULTS
from tests.vopr.loop import Process, SimLoop
from tests.vopr.network import Network
from tests.vopr.nodes import NodeProcess
from tests.vopr.operations import OPERATIONS
from tests.vopr.redis_link import RedisHost
from tests.vopr.rest import end
from tests.vopr.swarm import FAULTS_MIN, draw

LATE_S = 1.5
"""The seconds by which an operation may end after its time: a Redis that is in doubt, a transfer that is let go."""
OUTSTANDING = 5
"""Operations of one client at a time."""


class World:
    """The world of one seed. ``log`` gets a line for each event."""

    def __init__(self, seed: int, log: Callable[[str], None] | None = None) -> None:
        self.random = Random(f"{seed}/world")
        self._faults_random, self._operations_random = Random(f"{seed}/faults"), Random(f"{seed}/operations")
        usual = [{name: each[1] for name, each in table.items()} for table in (OPERATIONS, FAULTS)]
        self.plan = draw(seed, usual[0], usual[1])
        self.loop = SimLoop(Random(f"{seed}/loop"))
        self.network = Network(self.loop, Random(f"{seed}/network"))
        self.checker = Checker(self.loop.time)
        self.wire = Wire(self.network, Random(f"{seed}/wire"), self.checker)
        self.redis = RedisHost(self.network, Random(f"{seed}/redis"))
        self.redis.watch = self.checker.changed
        self.names = [f"kv-{number}" for number in range(self.plan.nodes)]
        disks = [name for name in self.names if self.random.random() < self.plan.disk_share]
        self.disks = {name: SimDisk(self.loop, Random(f"{seed}/{name}")) for name in disks}
        self.survivors: dict[str, list[tuple[bytes, int]]] = {}
        self.nodes: dict[str, NodeProcess] = {}
        self.lives: list[Process] = []
        self.clients: dict[str, ClientProcess] = {}
        self.covered: Counter[str] = Counter()
        self.operations: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self._log = log
        self.healed = False
        self.pending: dict[asyncio.Task[Any], ClientProcess] = {}
        patches.install(Random(f"{seed}/ids"), self.network, self.wire, self.redis, self.disks, self.plan.region_bytes)
        logger = logging.getLogger("pinyon")
        logger.setLevel(logging.DEBUG if log else logging.ERROR)
        logger.propagate = False
        logger.handlers = [LogWatch(self.checker, log and self.note)]
        self.loop.set_exception_handler(self._unhandled)

    def note(self, what: str) -> None:
        if self._log is not None:
            self._log(f"{self.loop.time():9.4f}  {what}")

    def _unhandled(self, loop: Any, context: dict[str, Any]) -> None:
        self.checker.fail(f"{context['message']}: {context.get('exception')!r}")

    def later(self, delay_s: float, work: Callable[..., object], *arguments: Any) -> None:
        self.network.later(delay_s, work, *arguments)

    # -- processes

    def start(self, name: str) -> None:
        """Starts a node, unless it runs."""
        there = self.nodes.get(name)
        if self.healed and self.plan.stays_dead and name == self.names[-1]:
            return
        if there is not None and not there.dead:
            if not self.healed:
                self.later(1.0, self.start, name)
            return
        for life in [each for each in self.lives if each.name == name and not each.dead]:
            life.over()  # type: ignore[attr-defined]  # one that was replaced; it may have the disk
        self.nodes[name] = life = NodeProcess(self, name, self.disks.get(name))
        self.lives.append(life)

    def replace(self, name: str) -> None:
        """Starts another process under the name of one that is frozen."""
        if self.nodes[name].frozen and not self.healed:
            self.nodes[name] = life = NodeProcess(self, name, None)
            self.lives.append(life)

    def join(self, name: str) -> None:
        self.clients[name] = client = ClientProcess(self, name)
        self.lives.append(client)

    def buried(self, process: Process) -> None:
        """Takes note that a process is gone: its connections break."""
        self.network.died(process)
        for key, engine in list(self.wire.engines.items()):
            if engine.process is process:
                del self.wire.engines[key]
            for move in [each for each in engine.moves if each.engine.process is process]:
                self.later(self.network.delay_s(), move.end)

    # -- operations and faults

    async def run(self) -> None:
        """Runs everything. What went wrong, if anything, is in ``checker.failure``."""
        for name in self.names:
            self.start(name)
        for number in range(self.plan.clients):
            self.join(f"client-{number}")
        await asyncio.sleep(1.0)
        length_s = self.plan.operations * self.plan.gap_s
        for _ in range(self.plan.faults):
            self.later(self._faults_random.uniform(0.0, length_s), self._strike, 0)
        for _ in range(3):
            self.later(self._faults_random.uniform(0.0, length_s), self.redis.remember)
        random, weights = self._operations_random, self.plan.operation_weights
        begun = looked = 0
        while begun < self.plan.operations and not self.checker.failure:
            await asyncio.sleep(random.expovariate(1 / self.plan.gap_s))
            running = [each for each in self.clients.values() if each.running and each.operations < OUTSTANDING]
            if running:
                (name,) = random.choices(list(weights), list(weights.values()))
                self._begin(random.choice(running), name)
                begun += 1
            if begun >= looked:
                looked += 16
                self.inspect()
        while self.faults.total() < FAULTS_MIN:
            self._strike(0)
            await asyncio.sleep(1.0)
        await end(self)

    def _begin(self, client: ClientProcess, name: str) -> None:
        random = Random(self._operations_random.random())
        timeout_s = random.choice([0.5, 2.0, 2.0, 7.0])
        task = client.spawn(self._operate(client, name, random, timeout_s), name)
        if random.random() < 0.05:
            self.later(random.expovariate(50.0), task.cancel)
        self.pending[task] = client
        task.add_done_callback(lambda _: self.pending.pop(task))

    async def _operate(self, client: ClientProcess, name: str, random: Random, timeout_s: float) -> None:
        began_s, frozen_s = self.loop.time(), client.frozen_s
        client.operations += 1
        outcome = "cancelled"
        try:
            outcome = await OPERATIONS[name][0](client, random, timeout_s)
        except PinyonError as error:
            outcome = type(error).__name__
        except Exception as error:
            self.checker.fail(f"{name} raised {error!r}")
        finally:
            client.operations -= 1
            self.operations[f"{name}: {outcome}"] += 1
            took_s = self.loop.time() - began_s - (client.frozen_s - frozen_s)
            self.note(f"{client.name} {name}: {outcome} after {took_s:.3f} s")
            if took_s > timeout_s + LATE_S:
                self.checker.fail(f"{name} with {timeout_s:g} s took {took_s:.3f} s")

    def _strike(self, tries: int) -> None:
        random, weights = self._faults_random, self.plan.fault_weights
        if self.healed:
            return
        (name,) = random.choices(list(weights), list(weights.values()))
        done = FAULTS[name][0](self, random)
        if done:
            self.faults[name] += 1
            self.note(f"FAULT {done}")
        elif tries < 50:
            self._strike(tries + 1)
        else:
            self.later(0.5, self._strike, 0)

    def inspect(self) -> None:
        for life in self.lives:
            self.checker.inspect(life)
            if isinstance(life, NodeProcess) and life.disk is not None and life.ready:
                self.checker.inspect_disk(life, life.disk)
