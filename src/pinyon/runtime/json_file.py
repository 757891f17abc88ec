"""JSON files named by settings."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from pinyon.core.errors import InvalidArgument

FILE_BYTES_MAX = 4 << 20

T = TypeVar("T")


def read_json(path: str, field: str, parse: Callable[[Any], T], nothing: T) -> T:
    """Returns what ``parse`` makes of the file, or ``nothing`` if no path is given.

    Raises :class:`InvalidArgument`, with the setting's name as its ``field``, if the file cannot be used."""
    if not path:
        return nothing
    try:
        with Path(path).open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
        if len(data) > FILE_BYTES_MAX:
            raise InvalidArgument(f"there are more than {FILE_BYTES_MAX >> 20} MiB", field=field)
        return parse(json.loads(data))
    except OSError as error:
        raise InvalidArgument(f"cannot read {path}: {error.strerror}", field=field) from None
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{path} is no JSON: {error}", field=field) from None
    except InvalidArgument as error:
        raise InvalidArgument(f"{path}: {error.message}", field=field) from None
