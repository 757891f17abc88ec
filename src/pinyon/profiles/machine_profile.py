"""The parts of one instance besides its engine: memory for KV, and the links over which KV moves.

Numbers are data (``machines/NAME.json``, or a user's file with the same fields), as those of engines.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from pinyon.core.errors import InvalidArgument
from pinyon.profiles.files import names_in, profile_from

_FOLDER = Path(__file__).with_name("machines")
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
    """Tokens of KV in device memory, beside the weights."""
    dram_tokens: int
    """Tokens of KV in the host's memory; 0: none."""
    dram_bytes_s: float
    """Bytes per second between host and device."""
    nic_bytes_s: float
    """Bytes per second of all NICs together, in each direction."""
    ssd_bytes_s: float
    """Bytes per second that all SSDs together read."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value, kind = getattr(self, field.name), str(field.type)
            if kind == "str":
                if not isinstance(value, str):
                    raise _bad(f"{field.name} must be a text")
            elif isinstance(value, bool) or not isinstance(value, int if kind == "int" else int | float):
                raise _bad(f"{field.name} must be a {'whole ' if kind == 'int' else ''}number, got {value!r}")
            elif not (0 if field.name == "dram_tokens" else 1) <= value <= MOST:
                raise _bad(f"{field.name} must be from 1 to {MOST:g}, got {value!r}")


def built_in_machines() -> list[str]:
    return names_in(_FOLDER)


def load_machine(name: str) -> MachineProfile:
    """Loads a built-in profile, or a file (has a ``/`` or ends in ``.json``). Raises :class:`InvalidArgument`."""
    return profile_from(MachineProfile, name, _FOLDER, "machine profile")


def _bad(message: str) -> InvalidArgument:
    return InvalidArgument(f"machine profile: {message}", field="machine_profile")
