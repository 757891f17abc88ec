"""What the regions have agreed on, from this one's files."""

from __future__ import annotations

import json
from pathlib import Path

from pinyon.core.errors import InvalidArgument
from pinyon.routing.geography import ANYWHERE, Geography, parse_geography
from pinyon.runtime.security import read_secret
from services.lb.settings import LbSettings
from services.lb.ways import WaysOptions

__all__ = ["load_federation", "load_geography"]

FILE_BYTES_MAX = 4 << 20


def load_federation(settings: LbSettings) -> WaysOptions:
    """Raises :class:`InvalidArgument`, naming the setting, for a file that cannot be used."""
    secret = b""
    if settings.federation_secret_file:
        try:
            secret = read_secret(Path(settings.federation_secret_file))
        except InvalidArgument as error:
            raise InvalidArgument(error.message, field="federation_secret_file") from None
    geography = load_geography(settings.geography_file)
    return WaysOptions(settings.region, secret, geography, settings.pushing_choice, settings.routing)


def load_geography(path: str) -> Geography:
    """Raises :class:`InvalidArgument`."""
    if not path:
        return ANYWHERE
    try:
        with Path(path).open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise InvalidArgument(f"cannot read {path}: {error.strerror}", field="geography_file") from None
    if len(data) > FILE_BYTES_MAX:
        raise InvalidArgument(f"{path} has more than {FILE_BYTES_MAX >> 20} MiB", field="geography_file")
    try:
        return parse_geography(json.loads(data))
    except ValueError as error:
        raise InvalidArgument(f"{path} is no JSON: {error}", field="geography_file") from None
    except InvalidArgument as error:
        raise InvalidArgument(f"{path}: {error.message}", field="geography_file") from None
