"""The hardware of one instance besides its engine: memory for KV, and the links over which KV moves.

The numbers are data (``machines/NAME.json``, or a user's file with the same fields), like those of engines."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pinyon.profiles.files import check_values, names_in, profile_from

_FOLDER = Path(__file__).with_name("machines")
KIND = "machine profile"
MOST = 1e15


@dataclass(frozen=True, slots=True)
class MachineProfile:
    """The numbers of a machine. Raises :class:`InvalidArgument` naming the field."""

    source: str
    stated: str
    assumed: str
    engine: str
    """The profile of its engine: see :func:`pinyon.profiles.engine_profile.load_profile`."""
    kv_token_bytes: int
    """KV bytes of one token, all layers."""
    hbm_tokens: int
    """Tokens of KV that device memory holds beside the weights."""
    dram_tokens: int
    """Tokens of KV that the host's memory holds; 0: none."""
    dram_bytes_s: float
    """Bytes per second between host and device."""
    nic_bytes_s: float
    """Bytes per second of all NICs together, in each direction."""
    ssd_bytes_s: float
    """Bytes per second that all SSDs together read."""

    def __post_init__(self) -> None:
        check_values(self, KIND, (1, MOST), dram_tokens=(0, MOST))


def built_in_machines() -> list[str]:
    return names_in(_FOLDER)


def load_machine(name: str) -> MachineProfile:
    """Loads a built-in profile, or a file (has a ``/`` or ends in ``.json``). Raises :class:`InvalidArgument`."""
    return profile_from(MachineProfile, name, _FOLDER, KIND)
