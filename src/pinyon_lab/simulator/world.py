"""The values that the parts of one simulated cluster have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from pinyon.core.journal import Journal
from pinyon.decisions import FrontConfig, InstanceConfig
from pinyon.placement.fleet import Fleet
from pinyon.profiles.engine_profile import EngineProfile
from pinyon.profiles.machine_profile import MachineProfile
from pinyon_lab.simulator.cluster_settings import ClusterSettings
from pinyon_lab.simulator.virtual_time import VirtualTime

JournalOf = Callable[[str, InstanceConfig | FrontConfig], Journal | None]
"""A function that returns the journal of a part's decisions, by the part's name; None: they are not recorded."""
NO_JOURNAL: JournalOf = lambda name, config: None  # noqa: E731 - what takes its place is a function


class Faults(Protocol):
    """The faults of a simulated cluster, other than instances that die."""

    def step_fails(self) -> bool:
        """Returns whether a step fails for one of its members; asked once for each member."""
        ...

    def reader_forgets(self) -> bool:
        """Returns whether a reader forgets to end a lease."""
        ...


@dataclass(frozen=True, slots=True)
class World:
    """The clock and the fleet, the profiles of machines and engines, and the faults."""

    time: VirtualTime
    fleet: Fleet
    settings: ClusterSettings
    machine: MachineProfile
    engine: EngineProfile
    faults: Faults | None = None
    journal: JournalOf = NO_JOURNAL
