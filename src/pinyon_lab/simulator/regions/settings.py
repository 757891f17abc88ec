"""The settings of a world of several regions, its network, and the systems that SkyWalker is compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from pinyon.core.errors import InvalidArgument
from pinyon.core.request import Role
from pinyon.profiles.machine_profile import MachineProfile
from pinyon.routing.policies import ROUTING_POLICIES
from pinyon.routing.pushing import PUSHING_RULES
from pinyon_lab.simulator.cluster_settings import ClusterSettings, StepRule

LOCAL_S: Final = 0.0005
"""The one-way time inside a region."""
ROUND_TRIPS_S: Final[Mapping[tuple[str, str], float]] = {("us", "eu"): 0.09, ("us", "asia"): 0.15, ("eu", "asia"): 0.2}
"""The round trips by pair of regions, in any order. Ours: the paper says that they take up to 200 ms (§2.1, §2.3)."""
OTHERS_S: Final = 0.15
"""The round-trip time of regions that are not in the table."""


BLOCK_TOKENS: Final = 16
"""The size of KV blocks, and of the chunks by which load balancers compare prompts; the paper's chunks are of text."""

GLOBAL_VIEW: Final = "global_view"
"""The simulator's own policy, which looks into all instances' caches (Fig. 6's optimum)."""


@dataclass(frozen=True, slots=True)
class RoutingSystem:
    """The way in which load balancers route; ``policy`` and ``pushing`` hold for both layers, by routing's names."""

    name: str
    policy: str
    pushing: str = "pending"
    alone: str = ""
    """The region of the only load balancer, which pushes to all instances; "": each region has a load balancer."""
    forwards: bool = True
    """True if calls may be forwarded to other regions."""
    told: bool = True
    """True if instances report their load with each answer, and not only when they are probed."""

    def __post_init__(self) -> None:
        try:
            if self.policy != GLOBAL_VIEW:
                ROUTING_POLICIES.checked(self.policy)
            PUSHING_RULES.checked(self.pushing)
        except ValueError as error:
            raise InvalidArgument(str(error), field="system") from None

    @property
    def probes(self) -> bool:
        """True if load balancers ask how many requests wait at instances."""
        return self.pushing.partition(":")[0] == "pending"


@dataclass(frozen=True, slots=True)
class WorldSettings:
    """The settings of a world; ``instances`` are counted by region."""

    instances: Mapping[str, int]
    round_trips_s: Mapping[tuple[str, str], float] = field(default_factory=lambda: ROUND_TRIPS_S)
    probe_s: float = 0.1
    """The interval of probes (§4.1)."""
    wait_s: float = 3600.0
    """The time that a request waits at a load balancer before it is given up."""

    def __post_init__(self) -> None:
        if not self.instances or any(number < 0 for number in self.instances.values()):
            raise InvalidArgument("there is at least one region, and in each no less than 0 instances", field="regions")
        if not any(self.instances.values()):
            raise InvalidArgument("at least one region has instances", field="regions")
        for pair, seconds in self.round_trips_s.items():
            if not 0 <= seconds <= 60:
                raise InvalidArgument(f"{' and '.join(pair)}: a round trip takes 0 to 60 s, not {seconds}")
        if not 0.001 <= self.probe_s <= 60:
            raise InvalidArgument(f"probes come every 0.001 to 60 s, not {self.probe_s}", field="probe_s")

    @property
    def regions(self) -> tuple[str, ...]:
        return tuple(self.instances)

    def one_way_s(self, one: str, other: str) -> float:
        """Returns the time of a message from region to region."""
        trips_s = self.round_trips_s
        return LOCAL_S if one == other else trips_s.get((one, other), trips_s.get((other, one), OTHERS_S)) / 2


PAPERS: Final = "pending:credits=false"
"""The paper's rule: any number may be pushed to an instance where no request waited at the last probe (§3.3)."""

SGLANGS: Final = "cache_aware:first=true"
"""The rule of SGLang's router: it ignores load among instances that match (§5.1)."""

SYSTEMS: Final[Mapping[str, RoutingSystem]] = {
    system.name: system
    for system in (
        RoutingSystem("gateway", "round_robin", "blind", forwards=False),
        RoutingSystem("rr", "round_robin", "blind", alone="us"),
        RoutingSystem("ll", "least_loaded", "blind", alone="us"),
        RoutingSystem("ch", "consistent_hash", "blind", alone="us"),
        RoutingSystem("sgl", SGLANGS, "blind", alone="us"),
        RoutingSystem("skywalker-ch", "consistent_hash", PAPERS, told=False),
        RoutingSystem("skywalker", "skywalker", PAPERS, told=False),
        RoutingSystem("region-local", "skywalker", PAPERS, forwards=False, told=False),
        RoutingSystem("pinyon", "skywalker"),
    )
}
"""The systems of §5, and pinyon as it routes by default, with credits between probes. A GKE gateway is modelled by its
default: a request goes to the cluster nearest to the client, and to its pods in turn."""


def sglang_instance(machine: MachineProfile) -> ClusterSettings:
    """Returns the settings of the paper's replicas, which SGLang serves first come, first served. Prefill precedes
    decoding, in whole prompts, with as many tokens at once as SGLang takes on a device of that size."""
    return ClusterSettings(
        (Role.MIXED,),
        BLOCK_TOKENS,
        machine.hbm_tokens // BLOCK_TOKENS * BLOCK_TOKENS,
        step_rule=StepRule.PREFILL_FIRST,
        whole_tokens=2048,
        batching="fcfs",
        service_order="fifo",
    )
