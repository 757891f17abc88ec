"""Who counts what becomes of requests."""

from __future__ import annotations

from typing import Protocol

from pinyon.api.worker.v1 import worker_pb2

__all__ = ["DecodeObserver"]


class DecodeObserver(Protocol):
    """Told of what metrics count."""

    def first_token(self, seconds: float) -> None: ...

    def request_ended(self, update: worker_pb2.StreamUpdate) -> None: ...
