"""The decisions of a service, composed of the pure rooms in the same way for the service, a simulator, and a replay."""

from pinyon.decisions.admission import Admission, BlockGrant
from pinyon.decisions.batch_room import BatchLoad, BatchRoom
from pinyon.decisions.front import FrontConfig, FrontDecisions
from pinyon.decisions.growth import Room, make_room
from pinyon.decisions.instance import InstanceConfig, InstanceDecisions
from pinyon.decisions.journal import JOURNAL_TYPES, journal_header, replay_journal
from pinyon.decisions.room_waits import RoomWaits

__all__ = [
    "JOURNAL_TYPES",
    "Admission",
    "BatchLoad",
    "BatchRoom",
    "BlockGrant",
    "FrontConfig",
    "FrontDecisions",
    "InstanceConfig",
    "InstanceDecisions",
    "Room",
    "RoomWaits",
    "journal_header",
    "make_room",
    "replay_journal",
]
