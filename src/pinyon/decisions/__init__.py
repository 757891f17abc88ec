"""What a service decides, put together from the pure rooms in one way: for the service, a simulator, and a replay."""

from pinyon.decisions.front import FrontConfig, FrontDecisions
from pinyon.decisions.instance import InstanceConfig, InstanceDecisions
from pinyon.decisions.journal import JOURNAL_TYPES, journal_header, replay_journal

__all__ = [
    "JOURNAL_TYPES",
    "FrontConfig",
    "FrontDecisions",
    "InstanceConfig",
    "InstanceDecisions",
    "journal_header",
    "replay_journal",
]
