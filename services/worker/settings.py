"""Settings of a worker."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator

from pinyon.batching import BATCHING_DEFAULT, BATCHING_POLICIES
from pinyon.batching.service_order import SERVICE_ORDER_DEFAULT, SERVICE_ORDERS
from pinyon.eviction import EVICTION_POLICIES
from pinyon.profiles.engine_profile import load_profile
from pinyon.runtime.eviction_choice import checked_eviction
from pinyon.runtime.journal_file import JournalSettings
from pinyon.runtime.settings import Address, checked, plain_redis, service_config, setting
from pinyon.runtime.transfer_engine import TransferSettings
from services.worker.orders.limits import WorkerLimits


class WorkerSettings(TransferSettings, JournalSettings, WorkerLimits):
    """An engine instance that computes prompts, generates tokens, or both."""

    model_config = service_config("worker")
    everyday: ClassVar[dict[str, str]] = {
        "the suite": "role conductor redis_url",
        "model and engine": "model served_model_name engine",
        "KV memory": "pool_blocks dram_blocks eviction",
        "steps": "batching step_tokens",
    }
    further: ClassVar[dict[str, str]] = {
        "model and engine": "engine_profile attention_kernel step_timeout_s",
        "KV memory": "block_tokens spare_queued",
        "steps": "batching_table service_order prefill_chunk_tokens step_tbt_s active_prefills",
    }

    role: Literal["prefill", "decode", "mixed"] = setting("mixed", "what this instance does")
    conductor: Address = setting("", "host:port of the conductor; empty: report to nobody")
    redis_url: str = setting("", "Redis with the KV store's metadata; empty: no store")

    model: str = setting("", "Hugging Face checkpoint folder; empty: the built-in model")
    served_model_name: str = setting("", "the name that clients use for the model; default: its own", max_length=128)
    engine: Literal["numpy", "instant", "paced"] = setting(
        "numpy", "what computes tokens; paced: sleeps as --engine-profile computes; instant: no time"
    )
    engine_profile: Annotated[str, checked(load_profile, empty=False)] = setting(
        "tiny", "what a paced engine imitates: a name of docs/design/worker.md, or a JSON file"
    )
    attention_kernel: Literal["plain", "whole", "grouped"] = setting(
        "grouped",
        "whose tokens read KV together in a step of the numpy engine: nobody's (plain), all, or those that "
        "share a prefix (grouped)",
    )
    pool_blocks: int = setting(
        1280, "KV blocks of the pool; with blocks of 32 the built-in model's context", ge=2, le=1 << 20
    )
    dram_blocks: int = setting(
        0, "KV blocks of a second tier, which keeps what the pool has no room for; 0: none", ge=0, le=1 << 22
    )
    block_tokens: int = setting(32, "tokens per KV block", ge=1, le=1024)
    eviction: Annotated[str, AfterValidator(checked_eviction)] = setting(
        "lru", f"which cached blocks go when room is needed: {EVICTION_POLICIES.choices}"
    )

    spare_queued: bool = setting(
        True, "evict what requests and prompts that wait here want only when nothing else is left"
    )
    batching: Annotated[str, AfterValidator(BATCHING_POLICIES.checked)] = setting(
        BATCHING_DEFAULT, f"who enters the batch: {BATCHING_POLICIES.choices}"
    )
    batching_table: str = setting(
        "", "a file that keeps what the batching policy learns; empty: it begins anew", max_length=4096
    )
    service_order: Annotated[str, AfterValidator(SERVICE_ORDERS.checked)] = setting(
        SERVICE_ORDER_DEFAULT, f"whose prompt is computed next: {SERVICE_ORDERS.choices}"
    )
    prefill_chunk_tokens: int = setting(256, "prompt tokens of one request in one step", ge=1, le=16384)
    step_tokens: int = setting(512, "tokens in one step; decoded ones go first", ge=1, le=32768)
    step_tbt_s: float = setting(
        0.1,
        "time that a step with running requests and chunks of prompts should take; 0: only the tokens bound it",
        ge=0,
        le=60,
    )
    active_prefills: int = setting(4, "prompts at once between leaving the queue and having been sent", ge=1, le=256)

    step_timeout_s: float = setting(
        20.0, "an engine step that takes longer hangs: requests go elsewhere", gt=0, le=3600
    )

    def exposed(self) -> list[str]:
        return super().exposed() + plain_redis(self, self.redis_url)
