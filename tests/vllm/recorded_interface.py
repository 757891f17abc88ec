"""Writes vLLM's interface as this version has it; run by the Python that has vLLM.

The names and arguments of what the connector implements, calls and reads."""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request


def arguments(kind: type, name: str) -> list[str]:
    return list(inspect.signature(getattr(kind, name)).parameters)


def fields(kind: type, *names: str) -> list[str]:
    return [name for name in names if name in {field.name for field in dataclasses.fields(kind)}]


def interface() -> dict[str, Any]:
    import pinyon.vllm as ours

    implemented = sorted(
        name for name in vars(ours.PinyonConnector) if not name.startswith("_") and hasattr(KVConnectorBase_V1, name)
    )
    request = Request.__init__.__code__.co_names + tuple(dir(Request))
    wanted = (
        *("request_id", "prompt_token_ids", "all_token_ids", "num_tokens", "num_prompt_tokens", "num_preemptions"),
        *("num_computed_tokens", "cache_salt", "lora_request", "mm_features", "pooling_params", "prompt_embeds"),
        *("kv_transfer_params", "skip_reading_prefix_cache"),
    )
    return {
        "KVConnectorBase_V1": {
            name: arguments(KVConnectorBase_V1, name)
            for name in implemented
            if callable(getattr(KVConnectorBase_V1, name))
        },
        "BlockPool": {name: arguments(BlockPool, name) for name in ("touch", "free_blocks", "get_num_free_blocks")},
        "KVCacheBlocks": {"get_block_ids": arguments(KVCacheBlocks, "get_block_ids")},
        "fields": {
            "KVCacheBlock": fields(KVCacheBlock, "block_id", "ref_cnt"),
            "SchedulerOutput": fields(
                SchedulerOutput, "scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens"
            ),
            "NewRequestData": fields(NewRequestData, "req_id", "block_ids", "num_computed_tokens"),
            "CachedRequestData": fields(
                CachedRequestData, "req_ids", "resumed_req_ids", "new_block_ids", "num_computed_tokens"
            ),
            "KVConnectorOutput": fields(
                KVConnectorOutput, "finished_recving", "invalid_block_ids", "kv_connector_worker_meta"
            ),
            "KVCacheConfig": fields(KVCacheConfig, "num_blocks", "kv_cache_groups"),
            "Request": sorted(set(wanted) & set(request)),
        },
    }


if __name__ == "__main__":
    json.dump(interface(), sys.stdout, indent=1, sort_keys=True)
