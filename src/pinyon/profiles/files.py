"""Profiles as files: JSON objects with the fields of a data class; fields that have a default may be missing."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar

from pinyon.core.errors import InvalidArgument
from pinyon.core.near import did_you_mean

FILE_BYTES_MAX = 65_536

Profile = TypeVar("Profile")


def names_in(folder: Path) -> list[str]:
    """Returns the names of the profiles that come with pinyon."""
    return sorted(path.stem for path in folder.glob("*.json"))


def profile_from(kind: type[Profile], name: str, folder: Path, what: str) -> Profile:
    """Loads the profile ``name`` from ``folder``, or from a file (has a ``/`` or ends in ``.json``). ``what`` is the
    kind of profile in messages and, with underscores, in an error's field. Raises :class:`InvalidArgument`."""

    def bad(message: str) -> InvalidArgument:
        return InvalidArgument(f"{what}: {message}", field=what.replace(" ", "_"))

    if "/" in name or name.endswith(".json"):
        path = Path(name)
    elif name in names_in(folder):
        path = folder / f"{name}.json"
    else:
        known_names = names_in(folder)
        hint = did_you_mean(name, known_names)
        raise bad(f"no such profile{hint}; known: {', '.join(known_names)}, or a JSON file")
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
        values: Any = json.loads(data) if len(data) <= FILE_BYTES_MAX else None
    except OSError as error:
        raise bad(f"cannot read {name}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise bad(f"{name} is not valid JSON") from None
    if not isinstance(values, dict):
        raise bad(f"{name} must hold a JSON object of at most {FILE_BYTES_MAX} bytes")
    known = fields(kind)  # type: ignore[arg-type]
    needed = {field.name for field in known if field.default is MISSING}
    wrong = (needed - values.keys()) | (values.keys() - {field.name for field in known})
    if wrong:
        raise bad(
            f"{name} must have the fields {', '.join(sorted(needed))}; missing or unknown: {', '.join(sorted(wrong))}"
        )
    return kind(**values)


def check_values(profile: Any, what: str, bounds: tuple[float, float], **other_bounds: tuple[float, float]) -> None:
    """Raises :class:`InvalidArgument` for the first field of a wrong type, or with a number beyond the bounds."""
    for field in fields(profile):
        value, kind = getattr(profile, field.name), str(field.type)
        least, most = other_bounds.get(field.name, bounds)
        if kind == "str":
            right, wanted = isinstance(value, str), "a text"
        elif isinstance(value, bool) or not isinstance(value, int if kind == "int" else int | float):
            right, wanted = False, "a whole number" if kind == "int" else "a number"
        else:
            right, wanted = least <= value <= most, f"from {least:g} to {most:g}"
        if not right:
            message = f"{what}: {field.name} must be {wanted}, got {value!r}"
            raise InvalidArgument(message, field=what.replace(" ", "_"))
