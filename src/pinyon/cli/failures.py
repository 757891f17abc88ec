"""Failed calls in plain words: the service, the address, and what may help."""

from __future__ import annotations

import grpc

from pinyon.cli.called import has_dev
from pinyon.core.errors import PinyonError, error_from_code
from pinyon.runtime.identity import CONDUCTOR, CONTROLLER, KVSTORE, LB, WORKER

SERVICES = {
    CONDUCTOR: "conductor",
    CONTROLLER: "controller",
    KVSTORE: "store node",
    LB: "load balancer",
    WORKER: "worker",
}
NOT_REACHED = ("failed to connect to all addresses", "errors resolving")
"""The beginnings of gRPC's own messages where no service has said anything."""
GRPC_PORTS = {CONDUCTOR: "7000 by default", CONTROLLER: "7100 by default", LB: "8001 by default"}
"""Hints where the gRPC port of a service is; `pinyon instances` lists the others."""
BROKEN = ("Socket closed", "Connection reset", "recvmsg", "Stream removed", "GOAWAY", "Broken pipe")


def plainly(error: grpc.RpcError, role: str, address: str, tls_dir: str) -> PinyonError:
    """Returns the error of a call to a service of that role, in plain words."""
    code = error.code().name
    return error_from_code(code, in_words(code, error.details() or "", role, address, tls_dir))


def printable(text: str) -> str:
    """Returns the text with terminal escapes and other control characters written out; line breaks stay."""
    return "".join([c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text])


def in_words(code: str, details: str, role: str, address: str, tls_dir: str) -> str:
    """Returns a status in plain words. The service's own message stays, without terminal escapes."""
    service, details = SERVICES[role], printable(details)
    if code == "UNAVAILABLE" and details.startswith(NOT_REACHED):
        return _not_reached(details, role, address, tls_dir)
    if code == "UNAVAILABLE" and details.startswith(BROKEN):
        return f"the connection to the {service} at {address} broke"
    if code == "DEADLINE_EXCEEDED":
        return f"the {service} at {address} did not answer in time"
    if code == "UNIMPLEMENTED":
        return f"what answers at {address} is no {service}, or one of another version"
    if code == "UNAUTHENTICATED" and "API key" in details:
        return f"{details} (--api-key, or PINYON_API_KEY)"
    if code == "UNAUTHENTICATED" and tls_dir and role == LB:
        return f"{details}; with TLS, admins reach a load balancer at its --admin-listen"
    return details or f"the {service} at {address} gave no reason ({code})"


def _not_reached(details: str, role: str, address: str, tls_dir: str) -> str:
    service = SERVICES[role]
    if details.startswith("errors resolving"):
        return f"{address} is not known: there is no such host"
    if "http1.x" in details or "ALPN" in details:
        return f"{address} is an HTTP port, no gRPC port of pinyon: {_another_one(role)}"
    if "Failed parsing HTTP/2" in details:
        return f"{address} is no gRPC port of pinyon: {_another_one(role)}"
    if "Connection refused" in details:
        start = "./dev up --regions NAME,NAME" if role == CONTROLLER else "./dev up"
        return f"no {service} answers at {address} (is it running?{f' {start}' if has_dev() else ''})"
    if tls_dir and "WRONG_VERSION_NUMBER" in details:
        return (
            f"the {service} at {address} speaks without TLS: leave out --tls-dir, and unset PINYON_TLS_DIR "
            "(or it is a port of metrics, which have no TLS on loopback)"
        )
    if tls_dir and "Verification" in details:
        return f"what answers at {address} is not a {service} of the cluster of {tls_dir}"
    if tls_dir and "CERTIFICATE_VERIFY_FAILED" in details:
        return f"what answers at {address} is not of the cluster of {tls_dir}: another authority made its certificate"
    if not tls_dir and any(each in details for each in BROKEN):
        of_dev = "; DIR/admin/admin of `./dev up --tls --tls-dir DIR`" if has_dev() else ""
        return (
            f"{address} closed the connection: it speaks TLS, it seems; --tls-dir DIR names your folder of "
            f"`pinyon certs` (role admin{of_dev})"
        )
    return f"no {service} answers at {address}: {details.partition('last error: ')[2] or details}"


def _another_one(role: str) -> str:
    return (
        f"it may be one of metrics{' (7300 and more in `./dev up`)' if has_dev() else ''} or of OpenAI's HTTP (8000); "
        f"the gRPC of the {SERVICES[role]} is another one "
        f"({GRPC_PORTS.get(role, '`pinyon instances` lists it')})"
    )
