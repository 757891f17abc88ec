"""The limits on accepted work and on waiting times."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from pinyon.runtime.settings import ServiceSettings, service_config


class WorkerLimits(ServiceSettings):
    """The bounds on requests and prompts; a part of the worker's settings."""

    model_config = service_config("service")
    everyday: ClassVar[dict[str, str]] = {"requests": "max_batch request_timeout_s"}
    further: ClassVar[dict[str, str]] = {
        "requests": "max_requests max_prefills room_timeout_s load_interval_s outbox_tokens write_timeout_s",
        "KV that moves": "fetch_timeout_s push_timeout_s settle_s lease_s max_lease_s store_queue_blocks store_queue_s "
        "store_timeout_s",
    }

    max_batch: int = Field(32, ge=1, le=4096, description="requests decoded in one step at most")
    max_requests: int = Field(4096, ge=1, le=65536, description="requests owned at once, waiting ones included")
    max_prefills: int = Field(4096, ge=1, le=65536, description="prompts accepted and not finished")
    request_timeout_s: float = Field(600.0, gt=0, le=86400, description="a request's time when it does not bring one")
    room_timeout_s: float = Field(20.0, gt=0, le=3600, description="wait for KV blocks before a prompt is refused")
    fetch_timeout_s: float = Field(
        2.0, gt=0, le=600, description="wait for reused KV before it is computed instead, and 1 s more for each GiB"
    )
    push_timeout_s: float = Field(5.0, gt=0, le=600, description="time for one write of KV to the decode instance")
    settle_s: float = Field(10.0, gt=0, le=600, description="wait for a cancelled prefill, then its writes are cut off")
    lease_s: float = Field(5.0, gt=0, le=600, description="a reader's lease when it does not ask for a time")
    max_lease_s: float = Field(30.0, gt=0, le=3600, description="longest lease a reader gets")

    load_interval_s: float = Field(
        0.1, ge=0.01, le=60, description="load balancers that ask are told of the load no more often"
    )
    outbox_tokens: int = Field(65536, ge=1, description="unsent tokens after which a slow reader is cut off")
    write_timeout_s: float = Field(10.0, gt=0, le=600, description="one message's time before a slow reader is cut off")

    store_queue_blocks: int = Field(
        512, ge=0, le=65536, description="blocks waiting for the KV store, at most 1/4 of the pool; 0: never store"
    )
    store_queue_s: float = Field(5.0, gt=0, le=600, description="how long a block may wait for the KV store")
    store_timeout_s: float = Field(2.0, gt=0, le=600, description="time for one put into the KV store")
