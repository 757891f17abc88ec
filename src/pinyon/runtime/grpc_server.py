"""A gRPC server as every service runs it: health, reflection, error statuses, bounded messages, graceful drain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pinyon.core.address import parse_address
from pinyon.core.errors import Unavailable
from pinyon.runtime.channel import KEEPALIVE_OPTIONS, MAX_MESSAGE_BYTES
from pinyon.runtime.interceptors import ErrorInterceptor

__all__ = ["GrpcServer"]

MAX_CONCURRENT_STREAMS = 4096


class GrpcServer:
    """``add`` the servicers, ``start``, and ``drain`` at the end."""

    def __init__(self, listen: str) -> None:
        self._listen = listen
        self._server = grpc.aio.server(
            interceptors=(ErrorInterceptor(),),
            options=(
                # Two servers on one port would share its connections silently.
                ("grpc.so_reuseport", 0),
                ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
                ("grpc.max_concurrent_streams", MAX_CONCURRENT_STREAMS),
                *KEEPALIVE_OPTIONS,
                # Peers ping an idle stream every second; the default would answer with GOAWAY.
                ("grpc.http2.min_ping_interval_without_data_ms", 500),
                ("grpc.http2.max_ping_strikes", 0),
            ),
        )
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._names: list[str] = []
        self._draining = False

    def add(self, register: Callable[[Any, Any], None], servicer: Any, descriptor: ServiceDescriptor) -> None:
        """``register`` is the generated ``add_XServicer_to_server``."""
        register(servicer, self._server)
        self._names.append(descriptor.full_name)

    async def start(self) -> str:
        """Bind, serve, report SERVING. Returns ``host:port``; raises :class:`Unavailable` if the port is taken."""
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        host, _ = parse_address(self._listen)
        try:
            port = self._server.add_insecure_port(self._listen)
        except RuntimeError as error:
            raise Unavailable(f"cannot listen on {self._listen}: the port is taken or not ours") from error
        await self._server.start()
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def begin_drain(self) -> None:
        """Report NOT_SERVING while still serving what is there."""
        if not self._draining:
            self._draining = True
            await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)

    async def set_serving(self, serving: bool) -> None:
        """What health checks are told, until it drains."""
        if not self._draining:
            status = health_pb2.HealthCheckResponse
            await self._set_health(status.SERVING if serving else status.NOT_SERVING)

    async def drain(self, seconds: float) -> None:
        """Report NOT_SERVING, let calls finish for ``seconds``, then end them."""
        await self.begin_drain()
        await self._server.stop(seconds)

    async def _set_health(self, status: Any) -> None:
        for name in ("", *self._names):
            await self._health.set(name, status)
