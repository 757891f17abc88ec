"""Settings of a worker."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from pinyon.batching import BATCHING_DEFAULT, BATCHING_POLICIES
from pinyon.batching.service_order import SERVICE_ORDER_DEFAULT, SERVICE_ORDERS
from pinyon.eviction import EVICTION_POLICIES
from pinyon.profiles.engine_profile import load_profile
from pinyon.runtime.eviction_choice import checked_eviction
from pinyon.runtime.journal_file import JournalSettings
from pinyon.runtime.settings import Address, checked, plain_redis, service_config
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

    role: Literal["prefill", "decode", "mixed"] = Field("mixed", description="what this instance does")
    conductor: Address = Field("", description="host:port of the conductor; empty: report to nobody")
    redis_url: str = Field("", description="Redis with the KV store's metadata; empty: no store")

    model: str = Field("", description="Hugging Face checkpoint folder; empty: the built-in model")
    served_model_name: str = Field("", max_length=128, description="what clients call the model; default: its own name")
    engine: Literal["numpy", "instant", "paced"] = Field(
        "numpy", description="what computes tokens; paced: sleeps as --engine-profile computes; instant: no time"
    )
    engine_profile: Annotated[str, checked(load_profile, empty=False)] = Field(
        "tiny", description="what a paced engine imitates: a name of docs/design/worker.md, or a JSON file"
    )
    attention_kernel: Literal["plain", "whole", "grouped"] = Field(
        "grouped",
        description="whose tokens read KV together in a step of the numpy engine: nobody's (plain), all, or those that "
        "share a prefix (grouped)",
    )
    pool_blocks: int = Field(
        1280, ge=2, le=1 << 20, description="KV blocks of the pool; with blocks of 32 the built-in model's context"
    )
    dram_blocks: int = Field(
        0,
        ge=0,
        le=1 << 22,
        description="KV blocks of a second tier, which keeps what the pool has no room for; 0: none",
    )
    block_tokens: int = Field(32, ge=1, le=1024, description="tokens per KV block")
    eviction: Annotated[str, AfterValidator(checked_eviction)] = Field(
        "lru",
        description=f"which cached blocks go when room is needed: {EVICTION_POLICIES.choices}",
    )

    spare_queued: bool = Field(
        True, description="evict what requests and prompts that wait here want only when nothing else is left"
    )
    batching: Annotated[str, AfterValidator(BATCHING_POLICIES.checked)] = Field(
        BATCHING_DEFAULT, description=f"who enters the batch: {BATCHING_POLICIES.choices}"
    )
    batching_table: str = Field(
        "", max_length=4096, description="a file that keeps what the batching policy learns; empty: it begins anew"
    )
    service_order: Annotated[str, AfterValidator(SERVICE_ORDERS.checked)] = Field(
        SERVICE_ORDER_DEFAULT,
        description=f"whose prompt is computed next: {SERVICE_ORDERS.choices}",
    )
    prefill_chunk_tokens: int = Field(256, ge=1, le=16384, description="prompt tokens of one request in one step")
    step_tokens: int = Field(512, ge=1, le=32768, description="tokens in one step; decoded ones go first")
    step_tbt_s: float = Field(
        0.1,
        ge=0,
        le=60,
        description="time that a step with running requests and chunks of prompts should take; 0: only the tokens "
        "bound it",
    )
    active_prefills: int = Field(
        4, ge=1, le=256, description="prompts at once between leaving the queue and having been sent"
    )

    step_timeout_s: float = Field(
        20.0, gt=0, le=3600, description="an engine step that takes longer hangs: requests go elsewhere"
    )

    def exposed(self) -> list[str]:
        return super().exposed() + plain_redis(self, self.redis_url)
