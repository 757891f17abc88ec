"""The gRPC health service of this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

Status = health_pb2.HealthCheckResponse


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # not in the stubs
    """The servicer. With the library's own, a watcher that reads nothing would block whoever sets the status."""

    def __init__(self) -> None:
        self._status: dict[str, Any] = {"": Status.SERVING}
        self._news = asyncio.Event()

    def say(self, names: Iterable[str], status: Any) -> None:
        """Sets the status of these services."""
        for name in names:
            self._status[name] = status
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> Any:
        status = self._status.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        return Status(status=status)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> AsyncIterator[Any]:
        """Yields each change; of several that come before a watcher reads, only the last one."""
        told = None
        while True:
            news, status = self._news, self._status.get(request.service, Status.SERVICE_UNKNOWN)
            if status != told:
                told = status
                yield Status(status=status)
            else:
                await news.wait()
