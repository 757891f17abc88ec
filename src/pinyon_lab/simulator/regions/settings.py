"""What a world of several regions is like, its network, and the systems that SkyWalker is compared with."""

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
"""One way inside a region."""
ROUND_TRIPS_S: Final[Mapping[tuple[str, str], float]] = {("us", "eu"): 0.09, ("us", "asia"): 0.15, ("eu", "asia"): 0.2}
"""There and back. Ours: the paper prints that it is up to 200 ms (§2.1, §2.3)."""
OTHERS_S: Final = 0.15
"""Of regions that are not in the table."""


class Network:
    """How long messages take between regions, and between which ones none get through. ``round_trips_s``: between two
    of them, in any order."""

    def __init__(self, round_trips_s: Mapping[tuple[str, str], float] = ROUND_TRIPS_S) -> None:
        for pair, seconds in round_trips_s.items():
            if not 0 <= seconds <= 60:
                raise InvalidArgument(f"{' and '.join(pair)}: a round trip takes 0 to 60 s, not {seconds}")
        self._trips_s = {frozenset(pair): seconds for pair, seconds in round_trips_s.items()}
        self._cut: set[str] = set()

    def one_way_s(self, one: str, other: str) -> float:
        return LOCAL_S if one == other else self._trips_s.get(frozenset((one, other)), OTHERS_S) / 2

    def round_trip_s(self, one: str, other: str) -> float:
        return 2 * self.one_way_s(one, other)

    def reaches(self, one: str, other: str) -> bool:
        """Messages get through."""
        return one == other or (one not in self._cut and other not in self._cut)

    def cut_off(self, region: str) -> None:
        """From now on nothing gets from it to another one, or back."""
        self._cut.add(region)

    def heal(self, region: str) -> None:
        self._cut.discard(region)


BLOCK_TOKENS: Final = 16
"""Of KV blocks, and of the chunks that load balancers tell prompts by: theirs are of text in the paper."""

GLOBAL_VIEW: Final = "global_view"
"""A policy of the simulator's own: it looks into all instances' caches (Fig. 6's optimum)."""


@dataclass(frozen=True, slots=True)
class System:
    """How load balancers route. ``policy`` and ``pushing`` are choices of routing's own; both layers have the same."""

    name: str
    policy: str
    pushing: str = "pending"
    alone: str = ""
    """The region of the only load balancer, which pushes to the instances of all; "": there is one in each."""
    forwards: bool = True
    """To other regions."""
    told: bool = True
    """Instances tell their load with each answer, and not only when they are probed."""

    def __post_init__(self) -> None:
        try:
            if self.policy != GLOBAL_VIEW:
                ROUTING_POLICIES.checked(self.policy)
            PUSHING_RULES.checked(self.pushing)
        except ValueError as error:
            raise InvalidArgument(str(error), field="system") from None

    @property
    def probes(self) -> bool:
        """Somebody wants to know who waits at instances."""
        return self.pushing.partition(":")[0] == "pending"


@dataclass(frozen=True, slots=True)
class WorldSettings:
    """``instances`` and ``clients`` by region; of clients, those that send programs one after the other."""

    instances: Mapping[str, int]
    round_trips_s: Mapping[tuple[str, str], float] = field(default_factory=lambda: ROUND_TRIPS_S)
    probe_s: float = 0.1
    """§4.1."""
    notice_s: float = 0.5
    """Until a connection that broke is noticed, and what went over it is sent again."""
    takeover_s: float = 2.0
    """Until the instances of a load balancer that died belong to the nearest one that lives (§4.2)."""
    wait_s: float = 3600.0
    """At a load balancer: then a request is given up."""
    tries: int = 16
    """Of a request, where things break under it."""

    def __post_init__(self) -> None:
        if not self.instances or any(number < 0 for number in self.instances.values()):
            raise InvalidArgument("there is at least one region, and in each no less than 0 instances", field="regions")
        if not any(self.instances.values()):
            raise InvalidArgument("at least one region has instances", field="regions")
        if not 0.001 <= self.probe_s <= 60:
            raise InvalidArgument(f"probes come every 0.001 to 60 s, not {self.probe_s}", field="probe_s")

    @property
    def regions(self) -> tuple[str, ...]:
        return tuple(self.instances)


PAPERS: Final = "pending:credits=false"
"""§3.3: any number may be pushed to who had nobody waiting at the last probe."""

SGLANGS: Final = "cache_aware:first=true"
"""That router takes no account of load among those that match (§5.1)."""

SYSTEMS: Final[Mapping[str, System]] = {
    system.name: system
    for system in (
        System("gateway", "round_robin", "blind", forwards=False),
        System("rr", "round_robin", "blind", alone="us"),
        System("ll", "least_loaded", "blind", alone="us"),
        System("ch", "consistent_hash", "blind", alone="us"),
        System("sgl", SGLANGS, "blind", alone="us"),
        System("skywalker-ch", "consistent_hash", PAPERS, told=False),
        System("skywalker", "skywalker", PAPERS, told=False),
        System("region-local", "skywalker", PAPERS, forwards=False, told=False),
        System("pinyon", "skywalker"),
    )
}
"""Of §5, and as pinyon routes by default: with credits between probes. A GKE gateway is modelled as what it does by
default: the cluster that is nearest to the client gets a request, and its pods get them in turn."""


def sglang_instance(machine: MachineProfile) -> ClusterSettings:
    """As the paper's replicas, which SGLang serves: prompts before decoding, whole ones, so many tokens at once as it
    takes on a device of that size; first come, first served."""
    return ClusterSettings(
        (Role.MIXED,),
        BLOCK_TOKENS,
        machine.hbm_tokens // BLOCK_TOKENS * BLOCK_TOKENS,
        step_rule=StepRule.PREFILL_FIRST,
        whole_tokens=2048,
        batching="fcfs",
        service_order="fifo",
    )
