"""How commands reach the services: plain, or with the folder that ``pinyon certs`` made for who types them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pinyon.cli.failures import SERVICES, plainly
from pinyon.core.address import parse_address
from pinyon.core.errors import FailedPrecondition, InvalidArgument
from pinyon.runtime.channel import PATIENT_CHANNEL_OPTIONS, tls_options
from pinyon.runtime.identity import CONDUCTOR, KVSTORE, LB, WORKER, peer_name

__all__ = ["add_tls_dir", "check_address", "check_role", "open_async_channel", "open_channel"]

OWN_SERVICES = {
    CONDUCTOR: "pinyon.api.conductor.v1.ConductorService",
    KVSTORE: "pinyon.api.kvstore.v1.KvStoreService",
    LB: "pinyon.api.lb.v1.LbService",
    WORKER: "pinyon.api.worker.v1.WorkerService",
}
"""What only a server of that role has."""


def add_tls_dir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tls-dir",
        default=os.environ.get("PINYON_TLS_DIR", ""),
        metavar="DIR",
        help="needed with TLS: your folder of `pinyon certs`, of the role admin (default: $PINYON_TLS_DIR)",
    )


def check_address(address: str) -> None:
    """gRPC and HTTP take another port where none is given: whoever forgot it would read that nobody answers. Raises
    :class:`InvalidArgument`."""
    try:
        host, _ = parse_address(address)
    except InvalidArgument:
        host = ""
    if not host or (":" in host and not address.startswith("[")):
        raise InvalidArgument(f"{address!r} is no HOST:PORT", field="address")


def check_role(channel: grpc.Channel, address: str, role: str, timeout_s: float) -> None:
    """Ask what answers there whether it is of that role. Raises :class:`FailedPrecondition` where it is not, and what
    gRPC raises where nobody answers."""
    request = health_pb2.HealthCheckRequest(service=OWN_SERVICES[role])
    try:
        health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s)
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.NOT_FOUND:
            raise
        raise FailedPrecondition(f"what answers at {address} is no {SERVICES[role]}") from None


@contextmanager
def open_channel(address: str, role: str, tls_dir: str, instance_id: str = "") -> Iterator[grpc.Channel]:
    """To the service of that role, and instance id if it is given. Raises :class:`PinyonError`, also for calls that
    fail within."""
    check_address(address)
    if not tls_dir:
        channel = grpc.insecure_channel(address, options=PATIENT_CHANNEL_OPTIONS)
    else:
        from pinyon.runtime.tls import client_credentials  # with TLS only: it brings cryptography

        channel = grpc.secure_channel(
            address,
            client_credentials(Path(tls_dir)),
            options=tls_options(peer_name(role, instance_id), PATIENT_CHANNEL_OPTIONS),
        )
    with channel:
        try:
            yield channel
        except grpc.RpcError as error:
            raise plainly(error, role, address, tls_dir) from None


def open_async_channel(address: str, role: str, tls_dir: str) -> grpc.aio.Channel:
    """As :func:`open_channel`, for a program with an event loop. Raises :class:`InvalidArgument`."""
    check_address(address)
    if not tls_dir:
        return grpc.aio.insecure_channel(address, options=PATIENT_CHANNEL_OPTIONS)
    from pinyon.runtime.tls import client_credentials  # as above

    return grpc.aio.secure_channel(
        address, client_credentials(Path(tls_dir)), options=tls_options(peer_name(role), PATIENT_CHANNEL_OPTIONS)
    )
