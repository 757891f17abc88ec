"""What the parts of one simulated cluster have in common."""

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
"""Where the decisions of a part, by its name, are written."""


def no_journal(name: str, config: InstanceConfig | FrontConfig) -> None:
    """They are written nowhere."""


class Faults(Protocol):
    """What goes wrong besides instances that die."""

    def step_fails(self) -> bool:
        """For one member of a step."""
        ...

    def reader_forgets(self) -> bool:
        """To end a lease."""
        ...


@dataclass(frozen=True, slots=True)
class World:
    """The time and the fleet, what its machines and engines are, and what may go wrong."""

    time: VirtualTime
    fleet: Fleet
    settings: ClusterSettings
    machine: MachineProfile
    engine: EngineProfile
    faults: Faults | None = None
    journal: JournalOf = no_journal
