"""How tokens are chosen."""

from __future__ import annotations

from typing import Any

from pinyon.api.common.v1 import common_pb2
from pinyon.core.request import SamplingParams

__all__ = ["sampling_from_proto", "sampling_to_proto", "sampling_values"]


def sampling_to_proto(sampling: SamplingParams) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        seed=sampling.seed,
        stop=sampling.stop,
        ignore_eos=sampling.ignore_eos,
    )


def sampling_from_proto(message: common_pb2.SamplingParams) -> SamplingParams:
    return SamplingParams(**sampling_values(message))


def sampling_values(message: common_pb2.SamplingParams) -> dict[str, Any]:
    """The fields by name, unchecked: for whoever has defaults of its own."""
    return {
        "max_tokens": message.max_tokens,
        # Six decimals give back what was written before it became a float32.
        "temperature": round(message.temperature, 6),
        "top_k": message.top_k,
        "top_p": round(message.top_p, 6) or 1.0,
        "seed": message.seed,
        "stop": tuple(message.stop),
        "ignore_eos": message.ignore_eos,
    }
