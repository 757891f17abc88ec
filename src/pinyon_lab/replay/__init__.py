"""The replay of a trace on a running suite, with the report of a simulated one."""

from pinyon_lab.replay.player import Player, Replayed, Sending
from pinyon_lab.replay.prompts import ReplayPrompts, TokenRange

__all__ = ["Player", "ReplayPrompts", "Replayed", "Sending", "TokenRange"]
