"""Writes vLLM's interface as this version has it into the named file; run by the Python that has vLLM.

``tests/data/vllm_interface`` has such a file for each version that was tried.

The names and arguments of what the connector implements, calls and reads."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import sys
import typing
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, UniformTypeKVCacheSpecs
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

CONFIGURED = {
    "model_config": (
        *("model", "revision", "dtype", "quantization", "seed", "max_model_len", "hf_overrides", "served_model_name"),
        *("override_generation_config", "hf_config"),
    ),
    "cache_config": ("cache_dtype",),
    "load_config": ("load_format",),
    "speculative_config": ("model",),
    "scheduler_config": ("max_num_seqs",),
    "parallel_config": (
        *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_rank", "rank"),
        *("decode_context_parallel_size", "prefill_context_parallel_size"),
    ),
    "kv_transfer_config": ("kv_connector_extra_config", "kv_load_failure_policy"),
}
"""The fields of vLLM's configuration that are read."""


def arguments(kind: type, name: str) -> list[str]:
    return list(inspect.signature(getattr(kind, name)).parameters)


def fields(kind: Any, *names: str) -> list[str]:
    there = dict.fromkeys(getattr(kind, "__struct_fields__", ()))  # LoRARequest is a struct of msgspec
    if dataclasses.is_dataclass(kind):
        there |= dict.fromkeys(field.name for field in dataclasses.fields(kind))
    return [name for name in names if name in there or hasattr(kind, name)]


def made(kind: type, *names: str) -> list[str]:
    """Returns which of these attributes the constructor makes."""
    return [name for name in names if name in kind.__init__.__code__.co_names]


def part(name: str) -> Any:
    """Returns the type of one part of vLLM's configuration."""
    hints = typing.get_type_hints(VllmConfig)[name]
    return next((each for each in typing.get_args(hints) if each is not type(None)), hints)


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
        "FreeKVCacheBlockQueue": {"prepend_n": arguments(FreeKVCacheBlockQueue, "prepend_n")},
        "KVCacheBlocks": {"get_block_ids": arguments(KVCacheBlocks, "get_block_ids")},
        "fields": {
            "BlockPool": made(BlockPool, "blocks", "enable_caching", "free_block_queue"),
            "FreeKVCacheBlockQueue": made(FreeKVCacheBlockQueue, "fake_free_list_head"),
            "KVCacheBlock": fields(KVCacheBlock, "block_id", "ref_cnt", "block_hash", "next_free_block"),
            "KVCacheGroupSpec": fields(KVCacheGroupSpec, "kv_cache_spec"),
            "FullAttentionSpec": fields(FullAttentionSpec, "block_size", "num_kv_heads", "head_size", "non_causal"),
            "UniformTypeKVCacheSpecs": fields(UniformTypeKVCacheSpecs, "kv_cache_specs"),
            "MultiModalFeatureSpec": fields(MultiModalFeatureSpec, "identifier", "mm_position"),
            "PlaceholderRange": fields(PlaceholderRange, "offset", "length"),
            "LoRARequest": fields(LoRARequest, "lora_name", "lora_path"),
            **{f"VllmConfig.{name}": fields(part(name), *names) for name, names in CONFIGURED.items()},
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
    lines = json.dumps(interface(), indent=1, sort_keys=True)
    text = re.sub(r"\[[^]]*]", lambda names: json.dumps(json.loads(names[0])), lines)
    Path(sys.argv[1]).write_text(text + "\n")
