"""gRPC channels between services: one per peer, kept open, with bounded detection of a dead peer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from pinyon.runtime.http2.calls import Http2Calls
from pinyon.runtime.http2.client import Http2Call

if TYPE_CHECKING:
    from pinyon.runtime.tls import Tls

Encode = Callable[[Any], bytes]
Decode = Callable[[bytes], Any]
OpenSession = Callable[[str, str, Encode, Decode], Http2Call]
"""A function that dials ``host:port`` for one duplex stream (:mod:`pinyon.runtime.duplex`); the caller closes it.

It takes the method's path, and the functions that encode and decode messages."""
open_session: OpenSession = Http2Call
"""The way to dial in plaintext."""

MAX_MESSAGE_BYTES = 4 * 1024 * 1024

# Between services, a frozen peer is noticed within 0.5 + 1 s. That leaves half a second for another instance to answer
# its requests within two seconds. gRPC core answers pings in its own threads, whatever the process computes; where the
# event loop is the server (runtime/http2), the event loop answers them.
# gRPC core bounds an unanswered ping by ping_timeout_ms (a minute by default), not by keepalive_timeout_ms alone.
KEEPALIVE_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 500),
    ("grpc.keepalive_timeout_ms", 1_000),
    ("grpc.http2.ping_timeout_ms", 1_000),
)

PATIENT_KEEPALIVE_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
)
"""Options for clients' programs: none of them can be replaced by another, and they may be busy or far away."""

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    *KEEPALIVE_OPTIONS,
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.max_pings_without_data", 0),
    # A peer that restarts is found again within about a second.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # In spite of its name, this also bounds one attempt to connect.
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.enable_retries", 0),
    # A new channel makes its own attempt. In a shared pool it would get the result of another one's earlier attempt.
    ("grpc.use_local_subchannel_pool", 1),
)

PATIENT_CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = tuple(
    (dict(CHANNEL_OPTIONS) | dict(PATIENT_KEEPALIVE_OPTIONS)).items()
)
"""The channel options of clients' programs."""


def open_channel(address: str) -> grpc.aio.Channel:
    """Returns a plaintext channel to ``host:port``, which the caller closes."""
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)


def tls_options(name: str, options: tuple[tuple[str, int], ...] = CHANNEL_OPTIONS) -> tuple[tuple[str, str | int], ...]:
    """Returns the options of a channel whose peer must have the certificate of ``name``, whatever its address is."""
    return (*options, ("grpc.ssl_target_name_override", name), ("grpc.default_authority", name))


def client_channel(address: str, name: str, files: Path | None, kind: Any = grpc) -> Any:
    """Returns a channel of a client's program to the peer whose certificate has ``name``; plain without ``files``.

    These are a folder of ``pinyon certs``. The channel is one of ``kind``: ``grpc``, or ``grpc.aio`` for an event loop.
    """
    if files is None:
        return kind.insecure_channel(address, options=PATIENT_CHANNEL_OPTIONS)
    from pinyon.runtime.tls import client_credentials  # with TLS only, because it imports cryptography

    return kind.secure_channel(address, client_credentials(files), options=tls_options(name, PATIENT_CHANNEL_OPTIONS))


class Channels:
    """The channels of one process: with its TLS files, or plain ones."""

    def __init__(self, tls: Tls | None = None) -> None:
        self._tls = tls

    def open(self, address: str, name: str) -> grpc.aio.Channel:
        """Returns a channel to the peer whose certificate has ``name`` (:mod:`pinyon.runtime.identity`).

        The caller closes the channel."""
        if self._tls is None:
            return open_channel(address)
        return grpc.aio.secure_channel(address, self._tls.channel_credentials, options=tls_options(name))

    def sessions_to(self, name: str) -> OpenSession:
        """Returns a function that dials the peer of that name for one stream."""
        return functools.partial(self._dial, name)

    def calls_to(self, address: str, name: str) -> Http2Calls:
        """Returns the way to make unary calls to the peer of that name; the caller closes it."""
        tls = self._tls
        return Http2Calls(address, None if tls is None else lambda: tls.session_client_context, name)

    def _dial(self, name: str, address: str, path: str, encode: Encode, decode: Decode) -> Http2Call:
        tls = None if self._tls is None else self._tls.session_client_context
        return Http2Call(address, path, encode, decode, tls, name)


PLAIN_CHANNELS = Channels()
