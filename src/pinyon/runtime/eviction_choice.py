"""Choices of eviction policies that name a file, which is read here: policies, replays and journals get its content."""

from __future__ import annotations

import os
import time

from pinyon.core.clock import Clock
from pinyon.core.errors import InvalidArgument
from pinyon.core.policies import split_choice
from pinyon.eviction import EVICTION_POLICIES
from pinyon.eviction.day_fits import DayFits
from pinyon.runtime.files import read_file

FILE_BYTES_MAX = 1 << 20
DAY_S = 86_400.0


def whole_choice(choice: str, clock: Clock | None = None) -> str:
    """Returns a choice in which ``fits=FILE`` is replaced by the fits themselves.

    Unless it is given, ``midnight_s`` becomes the value of the policy's ``clock`` at the last midnight (UTC); without a
    clock it stays 0. Raises ``ValueError`` for a file that has no fits."""
    name, options = split_choice(choice, EVICTION_POLICIES.names)
    parts = options.split(",") if options else []
    given = {part.partition("=")[0].strip(): at for at, part in enumerate(parts)}
    at = given.get("fits")
    if at is None:
        return choice
    parts[at] = f"fits={_read(parts[at].partition('=')[2].strip())}"
    if clock is not None and "midnight_s" not in given:
        parts.append(f"midnight_s={clock() - time.time() % DAY_S}")
    return f"{name}:{','.join(parts)}"


def checked_eviction(choice: str) -> str:
    """Validates a setting, and returns it unchanged."""
    EVICTION_POLICIES.checked(whole_choice(choice))
    return choice


def _read(path: str) -> DayFits:
    try:
        if not os.path.isfile(path):  # opening a pipe would block
            raise ValueError("no such file")
        return DayFits.of_json(read_file(path, FILE_BYTES_MAX, "eviction").decode("utf-8"))
    except InvalidArgument as error:
        raise ValueError(f"fits of {path!r:.200}: {error.message}") from None
    except ValueError as error:
        raise ValueError(f"fits of {path!r:.200}: {error}") from None
