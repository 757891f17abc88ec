"""The arguments of each of several processes: its own addresses and name, and its share of common limits.

No I/O: settings in, command lines out. A limit on what clients can make a host hold applies to all processes together
(each gets a part, rounded up); limits on a single request stay unchanged. Each process divides the servers' capacity by
itself, since that depends on what the servers report."""

from __future__ import annotations

from typing import Final

from pinyon.core.address import parse_address
from pinyon.core.errors import InvalidArgument
from services.lb.settings import LbSettings

DIVIDED: Final = (
    "in_flight_limit", "queue_limit", "connections_limit", "connections_per_peer", "requests_per_peer",
    "bodies_limit_mib", "upstream_connections",
)  # fmt: skip
"""The settings of which each process gets a part."""
INSTANCE_ID_MAX: Final = 64
PORT_MAX: Final = (1 << 16) - 1


def process_id(instance_id: str, number: int) -> str:
    """Returns the id under which a process is known to conductors, workers and other regions."""
    return f"{instance_id}-{number}"


def check_processes(settings: LbSettings, instance_id: str, certified: str) -> None:
    """Raises :class:`InvalidArgument` for settings that several processes cannot honour.

    ``certified`` is the instance that the certificate names; empty for any instance, or without a certificate."""
    count = settings.processes
    if certified:
        raise _bad(
            f"the certificate is that of the load balancer {certified}, and each process has a name of its own: "
            "it must be one of any load balancer"
        )
    if len(process_id(instance_id, count - 1)) > INSTANCE_ID_MAX:
        raise _bad(f"--instance-id has no room for the number of a process: {INSTANCE_ID_MAX} characters are the most")
    if settings.tenant_rpm or settings.tenant_tpm:
        raise _bad("--tenant-rpm and --tenant-tpm would be counted by each process by itself")
    for name in ("listen", "admin_listen"):
        port = parse_address(getattr(settings, name))[1] if getattr(settings, name) else 0
        if port and port + count - 1 > PORT_MAX:
            raise _bad(f"--{name.replace('_', '-')} is the first of {count} ports, and there are none after {PORT_MAX}")
    if (_share(settings.bodies_limit_mib, count) << 20) < 2 * settings.body_limit_bytes:
        raise _bad(
            f"--bodies-limit-mib {settings.bodies_limit_mib} leaves each process less than two bodies of "
            f"--body-limit-bytes {settings.body_limit_bytes}"
        )


def process_arguments(settings: LbSettings, instance_id: str, number: int, http_listen: str) -> list[str]:
    """Returns arguments that overrule the parent's command line and environment; all listen at ``http_listen``."""
    values: dict[str, str] = {
        "processes": "1",
        "http_listen": http_listen,
        "http_reuse_port": "true",
        "instance_id": process_id(instance_id, number),
        "listen": _next(settings.listen, number),
        "admin_listen": _next(settings.admin_listen, number),
        "metrics_listen": "127.0.0.1:0" if settings.metrics_listen else "",
    }
    if settings.journal:
        values["journal"] = f"{settings.journal}.{number}"
    if settings.upstream:
        values["upstream_sharers"] = str(settings.processes)
    for name in DIVIDED:
        if name.startswith("upstream_") and not settings.upstream:
            continue  # only used with servers
        values[name] = str(_share(getattr(settings, name), settings.processes))
    return [word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", value)]


def _share(limit: int, count: int) -> int:
    return -(-limit // count)


def _next(address: str, number: int) -> str:
    """Returns the address of process ``number``: the first one's port plus the number, or a free port (0)."""
    if not address:
        return ""
    host, port = parse_address(address)
    port = port and port + number
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _bad(message: str) -> InvalidArgument:
    return InvalidArgument(message, field="processes")
