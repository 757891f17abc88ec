"""Simulated clusters of Mooncake's testbed, for figures about whole systems."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pinyon.core.request import Role
from pinyon.profiles.engine_profile import EngineProfile, load_profile
from pinyon.profiles.machine_profile import MachineProfile, load_machine
from pinyon_lab.figures.figure import Tell
from pinyon_lab.figures.rows import counting
from pinyon_lab.figures.workload import Workload
from pinyon_lab.simulator.cluster import SimCluster
from pinyon_lab.simulator.cluster_settings import ClusterSettings
from pinyon_lab.simulator.models import ClusterModel, utilised
from pinyon_lab.simulator.report import FINISHED, RequestOutcome
from pinyon_lab.simulator.workload import Arrival, at_rate, cut, native_rate

MACHINE = "a800x8-llama-70b"
UTILISATION = 0.5
"""Our assumption: Table 1 has peak FLOP/s, and machines reach about half of it on prompts."""
NODES = 16
MIXED = (Role.MIXED,) * NODES
UNCUT = 1 << 40

MODEL_NOTE = (
    "Modelled: LLaMA3-70B on 8 x A800 by Table 1 at a utilisation of one half, decoding by memory bandwidth "
    "(`pinyon simulate --model a800x8-llama-70b --utilisation 0.5`); schedulers, queues, caches and batching are those "
    "that serve. Real engines need more time between steps than this one, so shares in time are higher than theirs."
)


def node() -> tuple[MachineProfile, EngineProfile]:
    machine = load_machine(MACHINE)
    return machine, utilised(load_profile(machine.engine), UTILISATION)


def split(prefills: int) -> tuple[Role, ...]:
    return (Role.PREFILL,) * prefills + (Role.DECODE,) * (NODES - prefills)


class Results(list[RequestOutcome]):
    """The outcomes of a run."""

    def effective(self, slo_s: float, tbt_slo_s: float) -> float:
        """Returns the share of the requests that meet both SLOs (§5.1)."""
        good = [each.end == FINISHED and each.ttft_s <= slo_s and each.tbt_s <= tbt_slo_s for each in self]
        return sum(good) / len(good)

    def mean_ttft_s(self) -> float:
        times = [each.ttft_s for each in self if each.ttft_s >= 0]
        return sum(times) / max(1, len(times))

    def reused(self) -> float:
        """Returns the share of all prompts' tokens that were held or fetched."""
        return sum(each.hit_tokens + each.fetched_tokens for each in self) / sum(each.tokens for each in self)


@dataclass(frozen=True, slots=True)
class TestbedSystem:
    """A cluster of the testbed; ``changes`` are fields of :class:`ClusterSettings`, ``nic_bytes_s`` of the machine."""

    name: str
    roles: tuple[Role, ...]
    policy: str
    changes: dict[str, Any]
    nic_bytes_s: float | None = None

    def model(self, block_tokens: int) -> ClusterModel:
        machine, engine = node()
        if self.nic_bytes_s is not None:
            machine = replace(machine, nic_bytes_s=self.nic_bytes_s)
        settings = ClusterSettings(
            self.roles, block_tokens, machine.hbm_tokens, batching="fcfs", service_order="fifo", **self.changes
        )
        return ClusterModel(settings, machine, engine, self.policy)

    def serve(self, workload: Workload, arrivals: Sequence[Arrival], tell: Tell) -> Results:
        text = f"{workload.name}: {self.name}"
        tell(text)
        return Results(self.model(workload.block_tokens).run(arrivals, seldom(counting(tell, text, len(arrivals)))))

    def cluster(self, block_tokens: int) -> SimCluster:
        """Returns the cluster itself, for figures that inspect it while it runs."""
        return self.model(block_tokens).cluster()


def seldom(tell: Callable[[int], None]) -> Callable[[int], None]:
    """Returns a function that passes on only every hundredth call."""
    return lambda done: tell(done) if done % 100 == 0 else None


def arrivals_of(workload: Workload, times: float = 1.0) -> list[Arrival]:
    """Returns the workload's arrivals at ``times`` times the trace's own rate."""
    arrivals = cut(workload.rows, workload.block_tokens, UNCUT)
    return at_rate(arrivals, times * native_rate(arrivals))
