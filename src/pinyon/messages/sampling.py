"""How tokens are chosen."""

from __future__ import annotations

from typing import Any

from pinyon.api.common.v1 import common_pb2
from pinyon.core.request import SamplingParams

__all__ = ["put_sampling", "sampling_from_proto", "sampling_to_proto", "sampling_values"]


def sampling_to_proto(sampling: SamplingParams) -> common_pb2.SamplingParams:
    message = common_pb2.SamplingParams()
    put_sampling(message, sampling)
    return message


def put_sampling(message: common_pb2.SamplingParams, sampling: SamplingParams) -> None:
    """Into one that is new. Every field costs, and most requests name few."""
    message.max_tokens = sampling.max_tokens
    message.top_p = sampling.top_p
    if sampling.temperature:
        message.temperature = sampling.temperature
    if sampling.top_k:
        message.top_k = sampling.top_k
    if sampling.seed:
        message.seed = sampling.seed
    if sampling.stop:
        message.stop.extend(sampling.stop)
    if sampling.ignore_eos:
        message.ignore_eos = True
    if sampling.min_p:
        message.min_p = sampling.min_p
    if sampling.min_tokens:
        message.min_tokens = sampling.min_tokens
    if sampling.stop_token_ids:
        message.stop_token_ids.extend(sampling.stop_token_ids)
    if sampling.repetition_penalty != 1.0:
        message.repetition_penalty = sampling.repetition_penalty
    if sampling.frequency_penalty:
        message.frequency_penalty = sampling.frequency_penalty
    if sampling.presence_penalty:
        message.presence_penalty = sampling.presence_penalty
    for token, bias in sampling.logit_bias:
        message.logit_bias.add(token=token, bias=bias)
    if sampling.logprobs >= 0:
        message.logprobs = sampling.logprobs
    if sampling.prompt_logprobs:
        message.prompt_logprobs = True


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
        "min_p": round(message.min_p, 6),
        "min_tokens": message.min_tokens,
        "stop_token_ids": tuple(message.stop_token_ids),
        "repetition_penalty": round(message.repetition_penalty, 6) if message.HasField("repetition_penalty") else 1.0,
        "frequency_penalty": round(message.frequency_penalty, 6),
        "presence_penalty": round(message.presence_penalty, 6),
        "logit_bias": tuple(sorted({each.token: round(each.bias, 6) for each in message.logit_bias}.items())),
        "logprobs": message.logprobs if message.HasField("logprobs") else -1,
        "prompt_logprobs": message.prompt_logprobs,
    }
