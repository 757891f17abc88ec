"""The setting that names further models besides the first one."""

from __future__ import annotations

from pathlib import PurePath

from pinyon.core.errors import InvalidArgument

MORE_MODELS_MAX = 31
NAME_CHARS_MAX = 128


def parse_more_models(text: str) -> dict[str, str]:
    """Returns folders by name from ``[NAME=]FOLDER`` with commas. Raises :class:`InvalidArgument`.

    A folder without a name gives its own name; a path cannot contain a comma.
    """
    found: dict[str, str] = {}
    for part in filter(None, (each.strip() for each in text.split(","))):
        name, equals, folder = part.partition("=")
        if not equals:
            name, folder = PurePath(part).name, part
        if not name or not folder or len(name) > NAME_CHARS_MAX:
            raise InvalidArgument(f"{part!r} is not [NAME=]FOLDER", field="more_models")
        if name in found:
            raise InvalidArgument(f"two models are called {name!r}", field="more_models")
        found[name] = folder
    if len(found) > MORE_MODELS_MAX:
        raise InvalidArgument(f"{len(found)} further models; {MORE_MODELS_MAX} are allowed", field="more_models")
    return found
