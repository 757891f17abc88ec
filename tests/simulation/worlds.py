"""Random simulated clusters in which everything goes wrong."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, replace

from pinyon.core.journal import Codec, Journal
from pinyon.core.request import Role
from pinyon.decisions import JOURNAL_TYPES, FrontConfig, InstanceConfig, journal_header
from pinyon.eviction import Traits
from pinyon.placement.policies import PLACEMENT_POLICIES
from pinyon.placement.scaling import ScalingSettings
from pinyon.profiles.engine_profile import EngineProfile
from pinyon.profiles.machine_profile import MachineProfile
from pinyon_lab.simulator.cluster import SimCluster
from pinyon_lab.simulator.cluster_settings import ClusterSettings, StepRule
from pinyon_lab.simulator.report import RequestOutcome
from pinyon_lab.simulator.workload import Arrival
from tests.simulation.leftovers import check_cluster

BLOCK = 16
TENANTS = 3
BATCHING = (
    *("fcfs", "most_in_time:age_s=0.1", "oracle:group_blocks=1", "lpm:fallback=4"),
    *("dfs_weight:tree_blocks=64", "sglang_fcfs", "dynamic:tbt_s=0.005"),
    *("feather:chunk_blocks=1", "feather:stop=q_learning,chunk_blocks=1", "feather:stop=heuristic,chunk_blocks=1"),
)
ENGINE = EngineProfile("s", "", "", 3e-3, 2e-5, 0.0, 0.0, 2e-4, 1e-8)
MACHINE = MachineProfile("s", "", "", "tiny", 1024, 1536, 0, 1e9, 4e7, 2e7)
SMALL = ClusterSettings(
    (Role.MIXED,) * 4,
    BLOCK,
    96 * BLOCK,
    max_batch=16,
    step_tokens=256,
    chunk_tokens=128,
    active_prefills=3,
    max_prefills=64,
    ttft_slo_s=1.5,
    front_slots=96,
    front_queue=64,
    lease_s=2.0,
    room_wait_s=2.0,
)

QUICK = ScalingSettings(1, 5, 0.2, hold_s=0.0, settle_s=0.1, between_s=0.1, idle_window_s=0.2)


@dataclass(frozen=True)
class Plan:
    """The events of a world; times are seconds of the virtual clock."""

    settings: ClusterSettings = SMALL
    policy: str = "kvcache_centric:balancing_threshold=1"
    requests: int = 10_000
    requests_per_s: float = 150.0
    cancelled: float = 0.1
    deaths: int = 40
    failed_steps: float = 0.002
    forgotten_leases: float = 0.05
    clients: int = 0
    journals: bool = False


class Misfortune:
    """See :class:`pinyon_lab.simulator.world.Faults`."""

    def __init__(self, rng: random.Random, failed_steps: float, forgotten_leases: float = 0.0) -> None:
        self._rng, self._failed_steps, self._forgotten_leases = rng, failed_steps, forgotten_leases

    def step_fails(self) -> bool:
        return self._rng.random() < self._failed_steps

    def reader_forgets(self) -> bool:
        return self._rng.random() < self._forgotten_leases


class World:
    """A cluster and the events that befall it."""

    def __init__(self, plan: Plan, seed: int) -> None:
        self.plan = plan
        self.rng = random.Random(seed)
        self._digest = hashlib.sha256()
        self.journals: dict[str, list[str]] = {}
        self._recording: list[Journal] = []
        self.cluster = SimCluster(
            plan.settings,
            MACHINE,
            ENGINE,
            PLACEMENT_POLICIES.make(plan.policy),
            seed,
            Misfortune(self.rng, plan.failed_steps, plan.forgotten_leases),
            self._journal,
            self._heard,
        )
        self.counts = self.cluster.counts
        self.outcomes: list[RequestOutcome] = []

    def _heard(self, now_s: float, *what: object) -> None:
        self._digest.update(repr((round(now_s, 9), *what)).encode())

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    def _journal(self, name: str, config: InstanceConfig | FrontConfig) -> Journal | None:
        if not self.plan.journals:
            return None
        lines = self.journals[name] = []
        header = journal_header(config, service=name)
        clock = lambda: self.cluster.time.now_s if hasattr(self, "cluster") else 0.0  # noqa: E731 - it is made first
        journal = Journal(lambda line: lines.append(line + "\n"), clock, Codec(JOURNAL_TYPES), header)
        self._recording.append(journal)
        return journal

    def run(self) -> None:
        rng, plan, time = self.rng, self.plan, self.cluster.time
        prefixes = [self._blocks(rng.randint(1, 6)) for _ in range(60)]
        arrivals: list[Arrival] = []
        now_s = 0.0
        for number in range(plan.requests):
            now_s += rng.expovariate(plan.requests_per_s)
            blocks = list(rng.choice(prefixes)) if rng.random() < 0.7 else []
            blocks += self._blocks(rng.randint(0, 6))
            tokens = len(blocks) * BLOCK + rng.randint(1, BLOCK - 1)
            follows = rng.randrange(number) if number and rng.random() < 0.1 else -1
            tenant = Traits("", f"tenant {number % TENANTS}")
            arrivals.append(Arrival(now_s, tokens, rng.randint(1, 40), (*blocks, -number - 1), tenant, follows))
            if rng.random() < plan.cancelled:
                time.at(now_s + rng.expovariate(4.0), lambda number=number: self._cancel(number))  # type: ignore[misc]
        for _ in range(plan.deaths):
            time.at(rng.uniform(0.0, now_s), self._death)
        self.outcomes = self.cluster.run(arrivals, plan.clients)

    def _cancel(self, number: int) -> None:
        """Cancels a request, as its client leaves. Nothing happens if it has ended, or has not come yet."""
        front = self.cluster.front
        request = front.requests.get(number)
        if request is None:
            return
        if not request.entered:
            front.end(request, "cancelled")
        elif request.queued:
            request.queued = False
            assert front.queue.cancel(number, self.cluster.time.now_s), f"request {number} is not in the queue"
            front.end(request, "cancelled")
        else:
            if request.attempt is not None and not request.attempt.over:
                self.cluster._withdraw(request.attempt)
            front.leave(request, "cancelled")

    def _blocks(self, count: int) -> list[int]:
        return [self.rng.getrandbits(100) for _ in range(count)]

    def _death(self) -> None:
        settings = self.plan.settings
        number = self.rng.randrange(len(settings.roles))
        role = settings.roles[number]
        name = f"{role.value}-{number:04d}"
        members = self.cluster.members
        if name in members.engines:
            self._kill(name)
            self.cluster.time.after(self.rng.uniform(0.2, 3.0), lambda: members.boot(name, role))

    def _kill(self, name: str) -> None:
        """Kills an instance with all it holds; its attempts are tried elsewhere."""
        cluster = self.cluster
        victim = cluster.members.remove(name)
        assert victim is not None
        cluster.log("death", name)
        there = [request.attempt for request in cluster.front.requests.values() if request.attempt is not None]
        for attempt in [each for each in there if not each.over and victim.boot in (each.prefill, each.decode)]:
            decode = cluster.members.boots.get(attempt.decode)
            if decode is not None and decode.decodes.get(attempt.number) is attempt:
                continue  # its prompt is computed and here: the prefill instance is no longer needed
            if not attempt.over:
                cluster.fail(attempt, name)

    def check(self) -> None:
        """Checks that every request ended once, and nothing is left anywhere."""
        assert len(self.outcomes) == self.plan.requests
        assert not any(journal.ended for journal in self._recording)
        check_cluster(self.cluster)


def played(plan: Plan, seed: int) -> World:
    print(f"seed {seed}")
    world = World(plan, seed)
    world.run()
    world.check()
    return world


def random_plan(seed: int) -> Plan:
    rng = random.Random(seed)
    roles = rng.choice(
        [
            (Role.MIXED,) * rng.randint(1, 4),
            (Role.PREFILL,) * rng.randint(1, 2) + (Role.DECODE,) * rng.randint(1, 2),
            (Role.PREFILL, Role.DECODE, Role.MIXED),
        ]
    )
    settings = replace(
        SMALL,
        roles=roles,
        hbm_tokens=rng.choice([24, 40, 96]) * BLOCK,
        dram_tokens=rng.choice([0, 0, 50]) * BLOCK,
        pool_tokens=rng.choice([0, 0, 64]) * BLOCK,
        pool_on_ssd=rng.random() < 0.5,
        prefix_cache=rng.random() < 0.9,
        pipeline=rng.choice([1, 1, 3]),
        step_rule=rng.choice([StepRule.MIXED, StepRule.MIXED, StepRule.PREFILL_FIRST]),
        service_order=rng.choice(["fifo", "shortest_in_time:age_s=0.1", "most_in_time:age_s=0.1"]),
        batching=rng.choice(BATCHING),
        slo_s=0.3,
        eviction=rng.choice(["lru", "fifo", "workload_aware"]),
        ttft_slo_s=rng.choice([0.0, 1.5]),
        tbt_slo_s=rng.choice([0.0, 0.0, 0.012]),
        step_tbt_s=rng.choice([0.0, 0.004]),
        path_s=rng.choice([0.0, 0.02]),
        scaling=rng.choice(
            [None, None, None, ScalingSettings(1, 5, 0.2, hold_s=0.0, settle_s=0.1, between_s=0.1, idle_window_s=0.2)]
        ),
        boot_s=0.05,
        front_slots=rng.choice([8, 96]),
        front_queue=rng.choice([4, 64]),
    )
    together = all(role is Role.MIXED for role in roles)
    return Plan(
        settings,
        rng.choice(
            ["kvcache_centric", "min_ttft", "least_loaded", "cache_affinity"] + ["dualmap:slo_s=0.05"] * together
        ),
        requests=rng.randint(5, 20),
        requests_per_s=rng.choice([20.0, 150.0, 1000.0]),
        cancelled=rng.choice([0.0, 0.3]),
        deaths=rng.randint(0, 4),
        failed_steps=rng.choice([0.0, 0.02]),
        clients=rng.choice([0, 0, 5]),
    )
