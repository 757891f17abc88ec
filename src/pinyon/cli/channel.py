"""How commands reach the services: plain, or with the folder that ``pinyon certs`` made for who types them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc

from pinyon.cli.failures import plainly
from pinyon.runtime.channel import PATIENT_CHANNEL_OPTIONS, tls_options
from pinyon.runtime.identity import peer_name

__all__ = ["add_tls_dir", "open_async_channel", "open_channel"]


def add_tls_dir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tls-dir",
        default=os.environ.get("PINYON_TLS_DIR", ""),
        metavar="DIR",
        help="of a cluster with TLS: your folder of `pinyon certs` (role admin); default: $PINYON_TLS_DIR",
    )


@contextmanager
def open_channel(address: str, role: str, tls_dir: str, instance_id: str = "") -> Iterator[grpc.Channel]:
    """To the service of that role, and instance id if it is given. Raises :class:`PinyonError`, also for calls that
    fail within."""
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
    """As :func:`open_channel`, for a program with an event loop."""
    if not tls_dir:
        return grpc.aio.insecure_channel(address, options=PATIENT_CHANNEL_OPTIONS)
    from pinyon.runtime.tls import client_credentials  # as above

    return grpc.aio.secure_channel(
        address, client_credentials(Path(tls_dir)), options=tls_options(peer_name(role), PATIENT_CHANNEL_OPTIONS)
    )
