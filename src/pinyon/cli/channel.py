"""Channels to the services: plain, or with the user's folder that ``pinyon certs`` made."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pinyon.cli.failures import SERVICES, plainly
from pinyon.core.address import parse_address
from pinyon.core.errors import FailedPrecondition, InvalidArgument
from pinyon.runtime.channel import client_channel
from pinyon.runtime.identity import CONDUCTOR, KVSTORE, LB, WORKER, peer_name

if TYPE_CHECKING:
    import ssl

CONDUCTOR_ADDRESS = "127.0.0.1:7000"
OWN_SERVICES = {
    CONDUCTOR: "pinyon.api.conductor.v1.ConductorService",
    KVSTORE: "pinyon.api.kvstore.v1.KvStoreService",
    LB: "pinyon.api.lb.v1.LbService",
    WORKER: "pinyon.api.worker.v1.WorkerService",
}
"""The gRPC service that only a server of the role has."""


def add_timeout(parser: argparse.ArgumentParser, seconds: float = 5.0) -> None:
    parser.add_argument(
        "--timeout-s",
        type=float,
        default=seconds,
        metavar="S",
        help=f"wait so long for an answer (default {seconds:g})",
    )


def add_conductor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--conductor", default=CONDUCTOR_ADDRESS, metavar="HOST:PORT", help=f"its gRPC (default {CONDUCTOR_ADDRESS})"
    )


def add_tls_dir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tls-dir",
        default=os.environ.get("PINYON_TLS_DIR", ""),
        metavar="DIR",
        help="needed with TLS: your folder of `pinyon certs`, of the role admin (default: $PINYON_TLS_DIR)",
    )


def add_api_key(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--api-key",
        default=os.environ.get("PINYON_API_KEY", ""),
        metavar="KEY",
        help="where the load balancer asks for one (default: $PINYON_API_KEY)",
    )


def authorization(api_key: str) -> tuple[tuple[str, str], ...]:
    """Returns the metadata of calls with that key. Raises :class:`InvalidArgument` if the key cannot be sent."""
    if not (api_key.isascii() and api_key.isprintable()):
        raise InvalidArgument(
            "--api-key (or PINYON_API_KEY) has characters that cannot be sent: a key is a line of printable ASCII",
            field="api_key",
        )
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()


def check_address(address: str) -> None:
    """Raises :class:`InvalidArgument` unless the address is HOST:PORT.

    Without a port, gRPC and HTTP would take another one, and the user would read that nobody answers."""
    try:
        host, _ = parse_address(address)
    except InvalidArgument:
        host = ""
    if not host or (":" in host and not address.startswith("[")):
        raise InvalidArgument(f"{address!r} is no HOST:PORT", field="address")


def check_role(channel: grpc.Channel, address: str, role: str, timeout_s: float) -> None:
    """Asks the server at this address whether it is of that role.

    Raises :class:`FailedPrecondition` if it is not, and what gRPC raises if nobody answers."""
    request = health_pb2.HealthCheckRequest(service=OWN_SERVICES[role])
    try:
        health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s)
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.NOT_FOUND:
            raise
        raise FailedPrecondition(f"what answers at {address} is no {SERVICES[role]}") from None


@contextmanager
def open_channel(address: str, role: str, tls_dir: str, instance_id: str = "") -> Iterator[grpc.Channel]:
    """Opens a channel to the service of that role, and of that instance id if it is given.

    Raises :class:`PinyonError`, also for calls that fail within."""
    with _channel(address, peer_name(role, instance_id), tls_dir) as channel:
        try:
            yield channel
        except grpc.RpcError as error:
            raise plainly(error, role, address, tls_dir) from None


def open_async_channel(address: str, role: str, tls_dir: str) -> grpc.aio.Channel:
    """Does what :func:`open_channel` does, for a program with an event loop. Raises :class:`InvalidArgument`."""
    channel: grpc.aio.Channel = _channel(address, peer_name(role), tls_dir, grpc.aio)
    return channel


def _channel(address: str, name: str, tls_dir: str, kind: Any = grpc) -> Any:
    check_address(address)
    try:
        return client_channel(address, name, Path(tls_dir) if tls_dir else None, kind)
    except InvalidArgument as error:
        raise _unusable(error.message) from None


def trusted(tls_dir: str) -> ssl.SSLContext:
    """Returns the context for HTTPS, which trusts the folder's authority. Raises :class:`InvalidArgument`."""
    import ssl

    path = Path(tls_dir) / "ca.crt"
    try:
        return ssl.create_default_context(cafile=str(path))
    except OSError as error:  # ssl.SSLError too
        said = "holds no PEM certificate" if isinstance(error, ssl.SSLError) else f"cannot be read: {error.strerror}"
        raise _unusable(f"{path} {said}") from None


def _unusable(said: str) -> InvalidArgument:
    made = "`pinyon certs DIR admin/admin` makes the files, in DIR/admin/admin"
    return InvalidArgument(f"--tls-dir (or PINYON_TLS_DIR): {said}; {made}", field="tls_dir")
