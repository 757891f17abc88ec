"""What the regions have agreed on, from this one's files."""

from __future__ import annotations

import json
from pathlib import Path

from pinyon.core.errors import InvalidArgument
from pinyon.frontdoor.routing_options import RoutingOptions
from pinyon.routing.geography import ANYWHERE, Geography, parse_geography
from pinyon.runtime.identity import ANY, check_region_name, region_name
from pinyon.runtime.logging import get_logger
from pinyon.runtime.security import Security
from services.lb.settings import LbSettings

__all__ = ["load_federation", "load_geography"]

FILE_BYTES_MAX = 4 << 20

_log = get_logger("lb.regions")


def load_federation(settings: LbSettings, security: Security) -> RoutingOptions:
    """Raises :class:`InvalidArgument`, naming the setting, for a file that cannot be used, and with TLS for a region
    that no certificate can name. One that does not name it is told."""
    if settings.region and security.tls is not None:
        check_region_name(settings.region, "region")
        if region_name(settings.region) not in security.tls.names:
            _log.warning(
                "%s does not name the region %s: the controller and load balancers of other regions will refuse this "
                "one; make it with pinyon certs DIR lb/%s@%s",
                security.tls.certificate,
                settings.region,
                security.tls.identity.instance_id or ANY,
                settings.region,
            )
    geography = load_geography(settings.geography_file)
    return RoutingOptions(settings.region, geography, settings.pushing_choice, settings.routing)


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
