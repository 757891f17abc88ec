"""The limits on accepted work and on waiting times."""

from __future__ import annotations

from typing import ClassVar

from pinyon.runtime.settings import ServiceSettings, setting


class WorkerLimits(ServiceSettings):
    """The bounds on requests and prompts; a part of the worker's settings."""

    everyday: ClassVar[dict[str, str]] = {"requests": "max_batch request_timeout_s"}
    further: ClassVar[dict[str, str]] = {
        "requests": "max_requests max_prefills room_timeout_s load_interval_s outbox_tokens write_timeout_s",
        "transfers of KV": "fetch_timeout_s push_timeout_s settle_s lease_s max_lease_s store_queue_blocks "
        "store_queue_s store_timeout_s",
    }

    max_batch: int = setting(32, "most requests decoded in one step", ge=1, le=4096)
    max_requests: int = setting(4096, "requests owned at once, waiting ones included", ge=1, le=65536)
    max_prefills: int = setting(4096, "prompts accepted and not finished", ge=1, le=65536)
    request_timeout_s: float = setting(600.0, "time for a request that names no time limit", gt=0, le=86400)
    room_timeout_s: float = setting(20.0, "wait for KV blocks before a prompt is refused", gt=0, le=3600)
    fetch_timeout_s: float = setting(
        2.0, "wait for reused KV, plus 1 s per GiB, before it is computed instead", gt=0, le=600
    )
    push_timeout_s: float = setting(5.0, "time for one write of KV to the decode instance", gt=0, le=600)
    settle_s: float = setting(10.0, "wait for a cancelled prefill before its writes are cut off", gt=0, le=600)
    lease_s: float = setting(5.0, "a reader's lease if it asks for no time", gt=0, le=600)
    max_lease_s: float = setting(30.0, "longest lease a reader gets", gt=0, le=3600)

    load_interval_s: float = setting(0.1, "least time between two load reports to a load balancer", ge=0.01, le=60)
    outbox_tokens: int = setting(65536, "unsent tokens after which a slow reader is cut off", ge=1)
    write_timeout_s: float = setting(10.0, "time to send one message before a slow reader is cut off", gt=0, le=600)

    store_queue_blocks: int = setting(
        512, "most blocks that wait for the KV store (at most a quarter of the pool); 0: never store", ge=0, le=65536
    )
    store_queue_s: float = setting(5.0, "longest time that a block may wait for the KV store", gt=0, le=600)
    store_timeout_s: float = setting(2.0, "time limit for one put into the KV store", gt=0, le=600)
